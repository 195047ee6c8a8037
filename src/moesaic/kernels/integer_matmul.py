"""The matmul of integer weights by definition: what every native level computes, bit for bit.

    block of 32    rows rounded to int8, times whole numbers of the weight: exact in any order
    leaf           adds dot * (weight scale * row scale) over its blocks, ascending, from +0
    leaves         meet as neighbours, until one is left

Every product and every sum of these is rounded to float32 by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.kernels.formats import group_size, grouped, round_rows
from moesaic.kernels.panel import PanelWeight
from moesaic.spec.quantised import BLOCK


def integer_linear(x_TD: Tensor, weight_FD: PanelWeight, *, num_shards: int = 1) -> Tensor:
    """x @ weight.T as [T, F] float32, x rounded to int8 by blocks of 32.

    Raises: ConfigError when `num_shards` leaves are not whole groups of the weight.
    """
    num_columns, width = weight_FD.shape
    weight_FD.kind.check_shards(width, num_shards)
    rows, weight = round_rows(x_TD), weight_FD.unpack()
    assert rows.scales is not None, "integer formats have scales"
    assert weight.scales is not None, "integer formats have scales"
    # Sums of 32 products of at most 127 * 127 are exact in float32, whatever order torch adds in.
    x_TBK, weight_FBK = grouped(rows.values(), BLOCK), grouped(weight.values(), BLOCK)
    blocks_in_group = group_size(weight.format, width) // BLOCK
    scales_FG = weight.scales.float()
    leaf = x_TBK.shape[1] // num_shards
    leaves = []
    for first in range(0, x_TBK.shape[1], leaf):
        total_TF = x_TD.new_zeros((x_TD.shape[0], num_columns), dtype=torch.float32)
        for block in range(first, first + leaf):
            dot_TF = x_TBK[:, block] @ weight_FBK[:, block].T
            total_TF += dot_TF * (rows.scales[:, block, None] * scales_FG[:, block // blocks_in_group])
        leaves.append(total_TF)
    while len(leaves) > 1:
        leaves = [leaves[i] + leaves[i + 1] for i in range(0, len(leaves), 2)]
    return leaves[0]
