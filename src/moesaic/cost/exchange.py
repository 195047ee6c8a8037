"""Rows that expert parallelism sends, counted: once a device, once a node, padded, hidden behind work.

`layouts` prices the same rows; these are the counts by themselves. Uniform routing throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import comb

PARTIAL_BYTES = 4
"""Of a part of a sum."""

REPORTED_LAUNCHES: Mapping[str, int] = {
    "FlashMoE": 1, "Comet": 33, "Megatron CUTLASS": 85, "Megatron Triton": 261, "DeepEP": 432,
    "DeepSpeedMoE": 550,
}  # fmt: skip
"""Kernels that one MoE layer launches. Source: reported by FlashMoE, arXiv:2506.04667, table 1."""


def copies_sent(num_tokens: int, experts_per_token: int, devices: int, num_slices: int = 1) -> float:
    """Rows that leave a device when every choice is sent by itself: n k (D - 1) / D.

    A choice is as many as its expert has slices, which devices hold alike.
    """
    return num_tokens * experts_per_token * num_slices * (devices - 1) / devices


def copies_once(
    num_tokens: int, experts_per_token: int, devices: int, num_experts: int, num_slices: int = 1
) -> float:
    """Rows that leave a device when a token goes once to a device with several of its experts.

    A device has a slice of as many experts as it would have whole, times the slices.

    Source: n (D - 1) (1 - C(E - E S / D, k) / C(E, k)).
    """
    k, held = experts_per_token, num_experts * num_slices // devices
    return num_tokens * (devices - 1) * (1.0 - comb(num_experts - held, k) / comb(num_experts, k))


def returned_bytes(
    num_tokens: int,
    experts_per_token: int,
    devices: int,
    row_width: int,
    *,
    result_bytes: int,
    num_slices: int = 1,
) -> float:
    """Bytes of results that come back to a device: a row for each choice, in numbers of `result_bytes`.

    Of a slice it is the root of its part of the sum, which is float32 until all are added.
    """
    number_bytes = result_bytes if num_slices == 1 else PARTIAL_BYTES
    return copies_sent(num_tokens, experts_per_token, devices, num_slices) * row_width * number_bytes


def copies_over_nodes(
    num_tokens: int, experts_per_token: int, devices: int, per_node: int, num_experts: int
) -> tuple[float, float]:
    """(once a device, once a node): rows of one device that cross nodes without and with a hop inside them.

    A token goes once to each node that has any of its experts, and is handed on there over the fast link.
    """
    once = copies_once(num_tokens, experts_per_token, devices, num_experts)
    across = once * (devices - per_node) / (devices - 1)
    return across, copies_once(num_tokens, experts_per_token, devices // per_node, num_experts)


def crossing_share(local_share: float, nodes: int) -> tuple[float, float]:
    """(share of rows that cross nodes, how much less that is than without replicas in the own node).

    Routing to a replica in one's own node first; without it a share of (nodes - 1) / nodes crosses.
    """
    crossing = 1.0 - local_share
    return crossing, 1.0 - crossing / ((nodes - 1) / nodes)


def hidden_share(exchange_s: float, compute_s: float) -> float:
    """Part of an exchange that other work of `compute_s` hides: min(1, Tf / Tc); all when it is shorter."""
    return 1.0 if exchange_s <= compute_s else compute_s / exchange_s


def expert_by_tensor_bytes(experts_per_token: int, devices: int) -> float:
    """Bytes that a device sends under expert parallelism by those under tensor parallelism: k / n.

    Source: two exchanges of B / n k (n - 1) / n rows against a ring sum of 2 (n - 1) / n B rows; without the
    saving of sending once a device.
    """
    return experts_per_token / devices


def payload_share(
    experts_per_token: int, devices: int, *, factor: float | None = None, num_experts: int | None = None
) -> float:
    """Rows that carry something, of those in buffers of one size for every device.

    Worst case (`factor` None): every destination has room for all tokens, of which k / (D - 1) are wanted at
    most, or, with `num_experts`, as many as uniform routing sends once a device. With a capacity factor:
    room for factor * k / D of them.
    """
    if num_experts is None:
        wanted = min(1.0, experts_per_token / (devices - 1))
    else:
        wanted = copies_once(1, experts_per_token, devices, num_experts) / (devices - 1)
    return wanted if factor is None else wanted / (factor * experts_per_token / devices)


def launch_seconds(num_launches: int, each_s: float = 5e-6) -> float:
    """What launching the kernels of a layer costs when nothing hides it."""
    return num_launches * each_s
