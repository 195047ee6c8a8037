"""The routed experts of one layer as one native call: see moe.hpp.

Weights are checked and turned into addresses once; a call takes four addresses more. Knows nothing of ranks,
plans or where experts come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moesaic.errors import KernelTimeout
from moesaic.kernels.formats import torch_dtype
from moesaic.kernels.native.elementwise import code_of
from moesaic.kernels.native.router import RouterLayer
from moesaic.kernels.native.shared import SharedLayer
from moesaic.kernels.panel import PanelWeight, Weight, check_shards
from moesaic.spec.model import MoeSpec
from moesaic.spec.numerics import Numerics

TIMEOUT_S = 300.0
"""A call that takes longer counts as hanging. guess: a thousand times a long prefill's layer."""

_kept: list[object] = []  # what a thread that hangs may still read or write: never freed


class ExpertTensors(Protocol):
    """The weights of one expert, as `experts.blob.ExpertWeights` has them."""

    @property
    def inner_FD(self) -> Weight: ...  # noqa: D102
    @property
    def down_DF(self) -> Weight: ...  # noqa: D102
    @property
    def inner_bias_F(self) -> Tensor | None: ...  # noqa: D102
    @property
    def down_bias_D(self) -> Tensor | None: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeCounts:
    """What the fused calls of one `NativeOps` did, since it was made."""

    launches: int  # one a layer, whatever call it is part of
    jobs: int
    weight_bytes: int  # of the distinct experts of each call, biases too


class MoeLayer:
    """y_TD of x_TD, experts_TK and weights_TK, for one layer whose experts are all here."""

    def __init__(
        self,
        compiled: Any,
        kernels: Any,
        numerics: Numerics,
        layer_idx: int,
        spec: MoeSpec,
        slots: Sequence[ExpertTensors],
        slot_of_expert: Sequence[int],
    ) -> None:
        """`slots` are kept, so that their memory stays.

        Raises: ConfigError when matmul_shards does not divide the inner width, into whole groups of an
                integer weight; ValueError from the kernels for weights that do not fit `spec`.
        """
        self._kernels, self._slots = kernels, tuple(slots)
        self._seam = torch_dtype(numerics.seam_dtype)
        self._width, self._num_choices = spec.row_width, spec.experts_per_token
        for slot in self._slots:
            check_shards(slot.down_DF, numerics.matmul_shards)
        self.native = compiled.MoeLayer(
            layer_idx=layer_idx,
            width=spec.row_width,
            inner_width=spec.expert_width,
            num_choices=spec.experts_per_token,
            shards=numerics.matmul_shards,
            is_gated=spec.is_gated,
            is_weight_on_input=spec.weight_on == "input",
            function=code_of(spec.activation),
            limit=math.inf if spec.activation_limit is None else spec.activation_limit,
            slope=spec.activation_alpha,
            is_bfloat16=self._seam == torch.bfloat16,
        )
        for slot in self._slots:
            self.native.add_slot(**_addresses(slot))
        self.native.set_slots([int(slot) for slot in slot_of_expert])

    def __call__(
        self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, *, timeout_s: float = TIMEOUT_S
    ) -> Tensor:
        """The weighted sum over each token's choices, in the seam dtype.

        Shapes:  x_TD [T, D] in the seam dtype; experts_TK [T, K] int64 (logical); weights_TK [T, K] float32.
        Raises:  KernelTimeout, after which the ops of this layer refuse all calls; ValueError for an expert
                 that does not exist.
        """
        assert x_TD.dtype == self._seam, f"rows are {x_TD.dtype}, the seam is {self._seam}"
        assert experts_TK.dtype == torch.int64, f"expert ids are int64, got {experts_TK.dtype}"
        assert weights_TK.dtype == torch.float32, f"weights are float32, got {weights_TK.dtype}"
        x_TD, experts_TK, weights_TK = x_TD.contiguous(), experts_TK.contiguous(), weights_TK.contiguous()
        num_tokens = x_TD.shape[0]
        y_TD = torch.empty((num_tokens, self._width), dtype=self._seam)
        try:
            self._kernels.moe(
                self.native,
                x_TD.data_ptr(),
                x_TD.numel(),
                experts_TK.data_ptr(),
                experts_TK.numel(),
                weights_TK.data_ptr(),
                weights_TK.numel(),
                y_TD.data_ptr(),
                num_tokens,
                timeout_s,
            )
        except TimeoutError as error:
            raise timed_out(error, self, x_TD, experts_TK, weights_TK, y_TD) from error
        return y_TD

    def half(
        self,
        router: RouterLayer,
        shared: SharedLayer | None,
        x_TD: Tensor,
        experts_TK: Tensor,
        weights_TK: Tensor,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> Tensor:
        """x + experts(norm(x)) in the seam dtype, a shared expert among them; what the router chose is
        written to `experts_TK` and `weights_TK`.

        Shapes:  x_TD [T, D] in the seam dtype; experts_TK [T, K] int64 (logical) and weights_TK [T, K]
                 float32, without gaps.
        Raises:  KernelTimeout, as a call.
        """
        assert x_TD.dtype == self._seam, f"rows are {x_TD.dtype}, the seam is {self._seam}"
        x_TD = x_TD.contiguous()
        y_TD = torch.empty_like(x_TD)
        try:
            self._kernels.moe_half(
                router.native,
                None if shared is None else shared.native,
                self.native,
                x_TD.data_ptr(),
                x_TD.numel(),
                experts_TK.data_ptr(),
                weights_TK.data_ptr(),
                y_TD.data_ptr(),
                x_TD.numel() // self._width,
                timeout_s,
            )
        except TimeoutError as error:
            raise timed_out(error, self, router, shared, x_TD, experts_TK, weights_TK, y_TD) from error
        return y_TD


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HalfLayer:
    """A sparse half whose experts are all here, for a call of whole layers."""

    router: RouterLayer
    shared: SharedLayer | None
    experts: MoeLayer

    @property
    def native(self) -> tuple[Any, Any, Any]:
        """What the kernels take."""
        shared = None if self.shared is None else self.shared.native
        return self.router.native, shared, self.experts.native


def timed_out(error: TimeoutError, *used: object) -> KernelTimeout:
    """The error for kernels that hang; what they may still use is never freed."""
    _kept.append(used)
    return KernelTimeout(f"{error}; its threads may still run, so these kernels stop here")


def _addresses(slot: ExpertTensors) -> dict[str, int | bool]:
    """What `add_slot` takes: addresses, bytes and formats."""
    inner_bias, down_bias = slot.inner_bias_F, slot.down_bias_D
    return {
        **_format(slot.inner_FD, slot.down_DF),
        "inner": _data(slot.inner_FD).data_ptr(),
        "inner_bytes": _data(slot.inner_FD).nbytes,
        "down": _data(slot.down_DF).data_ptr(),
        "down_bytes": _data(slot.down_DF).nbytes,
        "inner_bias": 0 if inner_bias is None else inner_bias.data_ptr(),
        "inner_bias_bytes": 0 if inner_bias is None else inner_bias.nbytes,
        "down_bias": 0 if down_bias is None else down_bias.data_ptr(),
        "down_bias_bytes": 0 if down_bias is None else down_bias.nbytes,
    }


def _data(weight: Weight) -> Tensor:
    data = weight.data if isinstance(weight, PanelWeight) else weight
    assert data.is_contiguous(), "the weights of an expert have no gaps"
    return data


def _format(inner: Weight, down: Weight) -> dict[str, int | bool]:
    if isinstance(inner, PanelWeight) and isinstance(down, PanelWeight):
        kind = inner.kind
        assert down.kind is kind, "an expert has one format"
        return {
            "is_bfloat16": False,
            "bits": kind.bits,
            "inner_group": kind.group_size(inner.width),
            "down_group": kind.group_size(down.width),
            "has_zeros": kind.has_zeros,
        }
    assert isinstance(inner, Tensor), "an expert has one format"
    return {
        "is_bfloat16": inner.dtype == torch.bfloat16,
        "bits": 0,
        "inner_group": 0,
        "down_group": 0,
        "has_zeros": False,
    }
