"""The feed-forward of routed experts, one after the other. Knows nothing of tokens, ranks or placement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moesaic.experts.blob import ExpertWeights
from moesaic.experts.contract import ExpertBatch, ExpertFfn, ExpertStore
from moesaic.kernels.formats import torch_dtype
from moesaic.kernels.ops import Ops
from moesaic.spec.model import MoeSpec
from moesaic.spec.tensor_split import check_slices
from moesaic.steps import Steps

# guess: experts with few jobs share one gather and one activation up to so many rows; a decode step visits
# dozens of experts with a row or two each, and would otherwise spend its time in calls
GROUP_ROWS = 256


class LoopFfn(ExpertFfn):
    """Matmuls expert by expert: the reference, and the CPU path.

    Rows alive at once are those of the busiest expert (or GROUP_ROWS, if that is more), never T * K: an
    expert's jobs stand together, so its rows are gathered when its turn comes and dropped when it ends.
    """

    def __init__(self, spec: MoeSpec, store: ExpertStore, ops: Ops, *, num_slices: int = 1) -> None:
        """`num_slices`: parts that experts are cut into, of which the store has some; results are theirs.

        Raises: ConfigError as `check_slices`.
        """
        check_slices(ops.numerics.matmul_shards, num_slices)
        self._spec = spec
        self._store = store
        self._ops = ops
        self._num_slices = num_slices
        self._seam = torch_dtype(ops.numerics.seam_dtype)

    def __call__(self, batch: ExpertBatch) -> Steps[Tensor]:
        """out_JD [J, D], one row per job, unweighted: in the seam dtype, of slices their roots in float32."""
        x_RD = batch.x_RD.unpack(self._seam)
        dtype = self._seam if self._num_slices == 1 else torch.float32
        out_JD = x_RD.new_empty((batch.row_J.shape[0], self._spec.row_width), dtype=dtype)
        starts = batch.offsets_L1.tolist()
        for wave in self._store.waves(batch.tag.layer_idx, batch.offsets_L1):
            # No turn is given away without need: turns decide the order in which ranks send.
            if not wave.ready.ready():
                yield wave.ready
            for slots in _groups(wave.slots, starts):
                jobs = slice(starts[slots[0]], starts[slots[-1] + 1])
                rows_TD = x_RD.index_select(0, batch.row_J[jobs])
                if self._spec.weight_on == "input":
                    rows_TD = (rows_TD * batch.weight_J[jobs].unsqueeze(-1)).to(self._seam)
                sizes = [starts[slot + 1] - starts[slot] for slot in slots]
                torch.cat(
                    self._experts(rows_TD, sizes, [wave.table[slot] for slot in slots]), out=out_JD[jobs]
                )
        return out_JD

    def _experts(self, x_TD: Tensor, sizes: list[int], weights: Sequence[ExpertWeights]) -> list[Tensor]:
        """The results of neighbouring experts, each over its own rows."""
        ops = self._ops
        inners = [
            ops.linear(x, of.inner_FD, of.inner_bias_F)
            for x, of in zip(x_TD.split(sizes), weights, strict=True)
        ]
        inner_TF = inners[0] if len(inners) == 1 else torch.cat(inners)
        pairs = zip(self._hidden(inner_TF).split(sizes), weights, strict=True)
        if self._num_slices > 1:
            num_leaves = ops.numerics.matmul_shards // self._num_slices
            return [ops.inner_root(hidden, of.down_DF, num_leaves) for hidden, of in pairs]
        return [ops.linear_inner(hidden, of.down_DF, of.down_bias_D) for hidden, of in pairs]

    def _hidden(self, inner_TF: Tensor) -> Tensor:
        """[T, F] of the first matmul's columns: gate and up, or up alone."""
        spec, ops = self._spec, self._ops
        if not spec.is_gated:
            return ops.activation(inner_TF, None, spec.activation)
        gate_TF, up_TF = inner_TF.chunk(2, dim=-1)
        if spec.activation == "swiglu_clamped":
            limit, slope = spec.activation_limit, spec.activation_alpha
            return ops.swiglu_clamped(gate_TF, up_TF, limit=limit, slope=slope)
        return ops.activation(gate_TF, up_TF, spec.activation)


def _groups(slots: Sequence[int], starts: Sequence[int]) -> Iterator[list[int]]:
    """Runs of slots whose jobs stand together and are at most those of the busiest slot, or GROUP_ROWS."""
    limit = max(GROUP_ROWS, *(starts[slot + 1] - starts[slot] for slot in slots))
    group = [slots[0]]
    for slot in slots[1:]:
        is_next = starts[slot] == starts[group[-1] + 1]
        if is_next and starts[slot + 1] - starts[group[0]] <= limit:
            group.append(slot)
        else:
            yield group
            group = [slot]
    yield group
