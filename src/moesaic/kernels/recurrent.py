"""Causal convolution and the gated delta rule in float32, one position after the other whatever the chunking.

A state is a C x C' matrix per value head, read at a key, corrected there, and read at a query:

    S <- decay * S                      decay = exp(log decay), one number per head
    S <- S + k (v - S^T k) beta         what S holds at k moves towards v
    o  = S^T q

Products and sums are rounded one by one and sums over C have a fixed order, so a sequence's bits do not
follow the number or the lengths of its neighbours, nor where a chunk ends.

Source:  Gated DeltaNet, arXiv:2412.06464, eq. 10.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.kernels.elementwise import exp
from moesaic.kernels.state_view import Scan, StateView

SCAN_BYTES = 2 * 2**20  # guess: states that are updated together, small enough to stay in a cache


def causal_conv(x_TF: Tensor, weight_FX: Tensor, view: StateView) -> Tensor:
    """Of each channel the weighted sum of its latest inputs, this one last: [T, F] float32.

    Inputs are rounded to the pool's format before use, so that it does not matter which of them were stored.

    Shapes:  weight_FX [F, conv width], oldest input first.
    """
    num_channels, conv_width = weight_FX.shape
    taps, slots = view.places.taps(conv_width), view.places.slots
    tails = slots.read(view.tails)
    inputs = torch.cat((tails.view(-1, num_channels), x_TF.to(tails.dtype)))
    weight_XF = weight_FX.float().t()
    y_TF = x_TF.new_zeros((len(x_TF), num_channels), dtype=torch.float32)
    for index_T, weight_F in zip(taps.input_XT, weight_XF, strict=True):
        y_TF += inputs.index_select(0, index_T).float() * weight_F
    slots.write(view.tails, inputs[taps.tail_BX])
    return y_TF


def delta_rule(
    q_TGC: Tensor, k_TGC: Tensor, v_THC: Tensor, log_decay_TH: Tensor, beta_TH: Tensor, view: StateView
) -> Tensor:
    """The queries' readings [T, H, C'] float32; consecutive value heads share a key head.

    Shapes:  q_TGC and k_TGC [T, G, C], v_THC [T, H, C'], all float32; G divides H.
    Units:   holds twice the states of one scan at a time: twice SCAN_BYTES, or twice one sequence's.
    """
    num_heads, key_width, value_width = view.states.shape[1:]
    num_groups = q_TGC.shape[1]
    shape = (num_groups, num_heads // num_groups, key_width, value_width)
    inputs = (q_TGC, k_TGC, v_THC, exp(log_decay_TH), beta_TH)
    out_THC = torch.empty_like(v_THC)
    state_bytes = num_heads * key_width * value_width * view.states.element_size()
    for scan in view.places.scans(max(1, SCAN_BYTES // state_bytes)):
        state = scan.slots.read(view.states)
        parts = tuple(x.index_select(0, scan.token_N) for x in inputs)
        out_THC.index_copy_(0, scan.token_N, _run(state.view(-1, *shape), scan, *parts))
        scan.slots.write(view.states, state)
    return out_THC


def _run(
    state: Tensor, scan: Scan, q_NGC: Tensor, k_NGC: Tensor, v_NHC: Tensor, decay_NH: Tensor, beta_NH: Tensor
) -> Tensor:
    """The readings of a scan's tokens, in their order; `state` [B, G, H / G, C, C'] is brought up to date."""
    num_groups, num_shared = state.shape[1:3]
    query, key = q_NGC[:, :, None, :, None], k_NGC[:, :, None, :, None]
    value = v_NHC.view(-1, num_groups, num_shared, 1, v_NHC.shape[-1])
    decay, beta = (x.view(-1, num_groups, num_shared, 1, 1) for x in (decay_NH, beta_NH))
    out, scratch = torch.empty_like(value), torch.empty_like(state)
    at = 0
    for count in scan.counts:
        now, live, product = slice(at, at + count), state[:count], scratch[:count]
        live *= decay[now]
        held = _sum_keys(torch.mul(live, key[now], out=product))
        change = (value[now] - held) * beta[now]
        live += torch.mul(key[now], change, out=product)
        out[now] = _sum_keys(torch.mul(live, query[now], out=product))
        at += count
    return out.view_as(v_NHC)


def _sum_keys(product: Tensor) -> Tensor:
    """The sum over the last dim but one, kept as size 1 and made in place, halves added to halves."""
    while (size := product.shape[-2]) > 1:
        half = size // 2
        total = product[..., :half, :]
        total += product[..., half : 2 * half, :]
        if size % 2:
            total[..., :1, :] += product[..., -1:, :]
        product = total
    return product
