"""Runs a model over micro-batches: hidden states of every token, logits of some. Knows no request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moesaic.engine.batch import BatchObserver, MicroBatch
from moesaic.engine.sampler import Float32Array
from moesaic.experts.contract import Tag
from moesaic.kv.pool import BatchLayout, KvPool
from moesaic.models.decoder import Decoder
from moesaic.sched.step import StepPlan
from moesaic.spec.experts import IntArray
from moesaic.steps import drive

STEP_TIMEOUT_S = 60.0  # guess: a local step never waits; a peer that is silent for so long is lost


class Runner:
    """One replica's model and KV pool.

    Owns:    the pool's bytes; who may use which block is in the plan.
    """

    def __init__(self, decoder: Decoder, pool: KvPool) -> None:
        self._decoder = decoder
        self._pool = pool

    @torch.inference_mode()
    def forward(
        self, plan: StepPlan, batches: Sequence[MicroBatch], observers: Sequence[BatchObserver]
    ) -> list[Tensor]:
        """Hidden states per micro-batch, KV written on the way.

        Shapes:  each [T, D] in the seam dtype.
        """
        steps = []
        for i, (batch, observe) in enumerate(zip(batches, observers, strict=True)):
            tag = Tag(
                epoch=plan.epoch,
                plan_version=plan.plan_version,
                step_id=plan.step_id,
                micro_batch=i,
                chunk=0,
                layer_idx=0,
            )
            layout = BatchLayout.of(batch.rows, self._pool)
            tokens_T = torch.from_numpy(batch.token_ids)
            steps.append(self._decoder.forward(tokens_T, layout, self._pool, tag, observe))
        return drive(steps, STEP_TIMEOUT_S)

    @torch.inference_mode()
    def logits(self, hidden_TD: Tensor, rows_B: IntArray) -> Float32Array:
        """Logits of chosen rows, each once and in ascending order.

        Shapes:  hidden_TD [T, D]; rows_B [B] int64; returns [B, V] float32.
        """
        if len(rows_B) < len(hidden_TD):
            hidden_TD = hidden_TD.index_select(0, torch.from_numpy(np.ascontiguousarray(rows_B)))
        logits_BV: Float32Array = self._decoder.logits(hidden_TD).contiguous().numpy()
        return logits_BV
