"""The fixed tree under every sum over a token's experts, and its evaluation in pieces.

A sum has fixed leaves in a fixed order; neighbours pair up, level by level, and a node without a sibling
moves up as it is. Whoever owns all leaves of a node may evaluate it; whoever joins nodes gets the bits of the
whole, because the tree, not the layout, says which two numbers meet. Knows nothing of ranks or transports.

    K = 6, level 0    0   1   2   3   4   5
           level 1      01      23      45         rank A owns 0 1 4, rank B owns 2 3 5:
           level 2          0123        45         A sends 01 and 4, B sends 23 and 5;
           level 3              012345             01 + 23, 4 + 5, then both: nothing else was ever added
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.kernels.elementwise import biased

# Elements of one float32 working tile: 2 MiB, which a core's share of the last-level cache holds.
# guess: 1 to 4 MiB were within noise of each other; a combine without tiles was several times slower.
_TILE_ELEMENTS = 1 << 19


def tree_sum(leaves: Sequence[Tensor | None]) -> Tensor:
    """The sum of the leaves by the tree: the definition that everything else here equals bit for bit.

    An absent leaf (None) is skipped, never added as zero: -0.0 + 0.0 is not -0.0. So six leaves sum like
    eight of which the last two are absent.
    """
    nodes = list(leaves)
    while len(nodes) > 1:
        rights = [*nodes[1::2], None][: len(nodes[0::2])]
        nodes = [_join(left, right) for left, right in zip(nodes[0::2], rights, strict=True)]
    assert nodes, "a sum needs leaves"
    assert nodes[0] is not None, "a sum needs at least one leaf that is present"
    return nodes[0]


def weigh(out_JD: Tensor, weight_J: Tensor | None, partial: torch.dtype) -> Tensor:
    """Leaves of the tree: expert outputs times their weights in float32, rounded to the inner nodes' dtype.

    The product is an op of its own: fused with a sum (FMA, addcmul) it would be rounded once instead of
    twice, and two layouts would differ by which of their products met a sum.

    Shapes:  out_JD [J, D] in the seam dtype; weight_J [J] float32, None where the weight went into the rows.
    """
    leaf_JD = out_JD.float() if weight_J is None else out_JD * weight_J.unsqueeze(-1)
    return leaf_JD.to(partial)


def combine_choices(
    out_JD: Tensor, job_TK: Tensor, weights_TK: Tensor | None, *, partial: torch.dtype, seam: torch.dtype
) -> Tensor:
    """y_TD: the tree over each token's choices, rounded to the seam dtype once.

    Shapes:  out_JD [J, D] in the seam dtype, unweighted; job_TK [T, K] int64, the row of out_JD that answers
             choice k of token t; weights_TK [T, K] float32, or None where the weight went into the rows.
    """
    num_tokens, num_choices = job_TK.shape
    width = out_JD.shape[-1]
    y_TD = out_JD.new_empty((num_tokens, width), dtype=seam)
    tile = max(1, _TILE_ELEMENTS // (num_choices * width))
    for first in range(0, num_tokens, tile):
        rows = slice(first, first + tile)
        picked_ND = out_JD.index_select(0, job_TK[rows].reshape(-1))
        leaf_ND = weigh(picked_ND, None if weights_TK is None else weights_TK[rows].reshape(-1), partial)
        y_TD[rows] = tree_sum(leaf_ND.view(-1, num_choices, width).unbind(1))
    return y_TD


def join_slices(
    root_JD: Tensor, job_NU: Tensor, bias_ED: Tensor | None, expert_N: Tensor, *, seam: torch.dtype
) -> Tensor:
    """out_ND: what whole experts would have said, from the roots that their slices have of the sum of down.

    The tree over the slices is the top of the tree over all leaves; it is rounded once, and the bias added.

    Shapes:  root_JD [J, D] float32; job_NU [N, U] int64, the row of root_JD of each slice of a choice;
             bias_ED [E, D] float32; expert_N [N] int64; returns [N, D] in the seam dtype.
    """
    (num_choices, num_slices), width = job_NU.shape, root_JD.shape[-1]
    out_ND = root_JD.new_empty((num_choices, width), dtype=seam)
    tile = max(1, _TILE_ELEMENTS // (num_slices * width))
    for first in range(0, num_choices, tile):
        rows = slice(first, first + tile)
        root_NUD = root_JD.index_select(0, job_NU[rows].reshape(-1)).view(-1, num_slices, width)
        bias_ND = None if bias_ED is None else bias_ED.index_select(0, expert_N[rows])
        out_ND[rows] = biased(tree_sum(root_NUD.unbind(1)).to(seam), bias_ND, seam)
    return out_ND


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Subtrees:
    """Roots of whole subtrees, of many tokens: what a rank sends instead of its choices.

    Node i of level l spans the leaves [i * 2**l, min((i + 1) * 2**l, K)) of its token.

    Shapes:  token_Q, level_Q, node_Q [Q] int64; value_QD [Q, D] in the partial dtype.
    """

    token_Q: Tensor
    level_Q: Tensor
    node_Q: Tensor
    value_QD: Tensor


def evaluate_subtrees(leaf_JD: Tensor, token_J: Tensor, choice_J: Tensor, num_choices: int) -> Subtrees:
    """The roots of the largest subtrees whose leaves are all here: as few values as can be sent.

    Shapes:  leaf_JD [J, D] as `weigh` made them; token_J, choice_J [J] int64, each pair once, in any order.
    """
    leaves = Subtrees(token_Q=token_J, level_Q=torch.zeros_like(token_J), node_Q=choice_J, value_QD=leaf_JD)
    return join_subtrees(leaves, num_choices)


def join_subtrees(given: Subtrees, num_choices: int) -> Subtrees:
    """The roots of the largest subtrees that what several owners sent fills, as one owner would send them.

    Shapes:  no leaf is spanned twice; in any order.
    """
    found: list[tuple[Tensor, int, Tensor, Tensor]] = []
    width, level = num_choices, 0
    key_Q, value_QD = given.token_Q[:0], given.value_QD[:0]
    while True:
        here = given.level_Q == level
        if bool(here.any()):
            key_Q, order_Q = torch.sort(torch.cat((key_Q, given.token_Q[here] * width + given.node_Q[here])))
            value_QD = torch.cat((value_QD, given.value_QD[here])).index_select(0, order_Q)
        if width == 1:
            break
        token_Q, node_Q = key_Q // width, key_Q % width
        is_left = torch.zeros_like(key_Q, dtype=torch.bool)
        is_left[:-1] = (node_Q[:-1] % 2 == 0) & (node_Q[:-1] + 1 < width) & (key_Q[1:] == key_Q[:-1] + 1)
        is_right = torch.zeros_like(is_left)
        is_right[1:] = is_left[:-1]
        is_single = node_Q == width - 1 if width % 2 else torch.zeros_like(is_left)
        is_parent = is_left | is_single
        is_root = ~(is_parent | is_right)
        found.append((token_Q[is_root], level, node_Q[is_root], value_QD[is_root]))
        parent_QD = value_QD[is_parent]
        parent_QD[is_left[is_parent]] = value_QD[is_left] + value_QD[is_right]
        width, level = (width + 1) // 2, level + 1
        key_Q, value_QD = token_Q[is_parent] * width + node_Q[is_parent] // 2, parent_QD
    found.append((key_Q, level, torch.zeros_like(key_Q), value_QD))
    return Subtrees(
        token_Q=torch.cat([token for token, _, _, _ in found]),
        level_Q=torch.cat([torch.full_like(token, at) for token, at, _, _ in found]),
        node_Q=torch.cat([node for _, _, node, _ in found]),
        value_QD=torch.cat([value for _, _, _, value in found]),
    )


def combine_subtrees(
    parts: Sequence[Subtrees], num_tokens: int, num_choices: int, *, seam: torch.dtype
) -> Tensor:
    """y_TD from the roots that all owners sent: bit-equal to `combine_choices` over the leaves.

    Shapes:  the parts together cover every choice of every token once; returns [T, D] in the seam dtype.
    """
    token_Q, level_Q, node_Q = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("token_Q", "level_Q", "node_Q")
    )
    value_QD = torch.cat([part.value_QD for part in parts])
    spans_Q = ((node_Q + 1) << level_Q).clamp(max=num_choices) - (node_Q << level_Q)
    covered, needed = int(spans_Q.sum()), num_tokens * num_choices
    assert covered == needed, f"subtrees cover {covered} choices of {needed}"
    node_TKD = value_QD.new_zeros((num_tokens, num_choices, value_QD.shape[-1]))
    level = 0
    while True:
        # A node that is not here yet holds a sum of zeros; its root, sent at its own level, overwrites it.
        here = level_Q == level
        node_TKD[token_Q[here], node_Q[here]] = value_QD[here]
        if node_TKD.shape[1] == 1:
            return node_TKD[:, 0].to(seam)
        node_TKD = _pair_up(node_TKD)
        level += 1


def _join(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right


def _pair_up(node_TKD: Tensor) -> Tensor:
    """One level up: neighbours added, an odd last node carried."""
    even = node_TKD.shape[1] & ~1
    parent_TKD = node_TKD[:, 0:even:2] + node_TKD[:, 1:even:2]
    return parent_TKD if even == node_TKD.shape[1] else torch.cat((parent_TKD, node_TKD[:, even:]), dim=1)
