"""Our side of `moesaic verify`, a process of its own: hidden states, logits, greedy tokens, the matrix.

Loads the model once. The hidden states are taken by a tap that is built around a decoder here; a decoder
without one does nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.audit.child import Job, Say, serve_job
from moesaic.audit.matrix import answer, negative_control, open_engine, run_matrix
from moesaic.engine.machine import read_machine
from moesaic.experts.contract import Tag
from moesaic.kv.pool import BatchLayout, KvPool
from moesaic.models.accounting import survey
from moesaic.models.build import LoadedModel, load, read_spec
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.decoder import Decoder
from moesaic.models.families import FAMILIES
from moesaic.sched.ledger import cache_groups
from moesaic.sched.request import Request, SamplingParams
from moesaic.sched.step import RowPlan
from moesaic.steps import drive

STEP_TIMEOUT_S = 600.0  # guess: one rank never waits for another


def probe(job: Job, say: Say) -> Mapping[str, Any]:
    """What our side has to say of a checkpoint."""
    say("reading the names of the tensors")
    unconsumed, unfilled = unsettled(job.model)
    tensors = {"unconsumed": unconsumed, "unfilled": unfilled}
    if unconsumed or unfilled:
        return tensors
    say("loading the checkpoint")
    model = load(
        job.model,
        num_threads=job.num_threads,
        dtype=job.dtype,  # type: ignore[arg-type]  # checked by the parent
        backend=job.backend,
        format=job.format,  # type: ignore[arg-type]  # checked by the parent
        kv_format=job.kv_format,  # type: ignore[arg-type]  # checked by the parent
        wire_format=job.wire_format,  # type: ignore[arg-type]  # checked by the parent
        matmul_shards=job.matmul_shards,
        available_bytes=read_machine().available_bytes,
    )
    for i, prompt in enumerate(job.prompts):
        say(f"prompt {i + 1} of {len(job.prompts)}, {len(prompt)} tokens")
        hidden, logits = run_prompt(model, prompt)
        np.save(job.path(f"engine.{i}.hidden.npy"), hidden)
        np.save(job.path(f"engine.{i}.logits.npy"), logits)
    say(f"{job.num_tokens} greedy tokens after each prompt")
    greedy = _greedy(model, job.prompts, job.num_tokens)
    cells = run_matrix(model, job.prompts, say)
    say("matrix: the negative control")
    return {
        **tensors,
        "known_unused": [asdict(tensor) for tensor in model.accounting.unused],
        "dtype": model.numerics.seam_dtype,
        "backend": model.numerics.backend,
        "greedy": greedy,
        "matrix": [asdict(cell) for cell in cells],
        "negative_control_caught": negative_control(model, job.prompts),
    }


def unsettled(folder: str) -> tuple[list[str], list[str]]:
    """(keys that no parameter takes, parameters that no key fills); `models.accounting` refuses either.

    Raises: what reading the config and the headers raises.
    """
    spec, checkpoint = read_spec(folder), Checkpoint.open(folder)
    names = FAMILIES.get(spec.family)
    if spec.runnable_reasons or names is None:
        return [], []  # `load` says why it does not run
    found = survey(checkpoint, spec, names)
    return list(found.unknown), list(found.missing)


@torch.inference_mode()
def run_prompt(
    model: LoadedModel, prompt: Sequence[int]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Hidden states before each layer and after the last, and the logits, of a prompt computed at once.

    Shapes:  [layers + 1, T, D] float32; [T, V] float32.
    """
    hidden: list[Tensor] = []
    decoder = tapped(model.decoder, hidden.append)
    kv_block = model.numerics.kv_block
    groups = cache_groups(model.spec, model.numerics.kv_format, kv_block)
    num_blocks = -(-len(prompt) // kv_block)
    pool = KvPool(model.spec, model.numerics, (num_blocks,) * len(groups))
    row = RowPlan(
        request_id="prompt",
        start_idx=0,
        num_tokens=len(prompt),
        is_sampled=True,
        token_ids=tuple(prompt),
        blocks=tuple(tuple(range(num_blocks)) for _ in groups),
        state_from=None,
        state_to=0 if any(group.kind == "state" for group in groups) else None,
    )
    tag = Tag(epoch=0, plan_version=0, step_id=0, micro_batch=0, chunk=0, layer_idx=0)
    steps = decoder.forward(torch.tensor(prompt), BatchLayout.of([row], pool), pool, tag)
    [last_TD] = drive([steps], STEP_TIMEOUT_S)
    logits_TV = decoder.logits(last_TD)
    return torch.stack(hidden).float().numpy(), logits_TV.float().contiguous().numpy()


class _Tap:
    """A half of a layer that also shows what goes into it."""

    def __init__(self, half: Any, see: Callable[[Tensor], None]):
        self._half, self._see = half, see

    def forward(self, x_TD: Tensor, *rest: Any) -> Generator[Any, None, Tensor]:
        """The half's own forward."""
        self._see(x_TD)
        y_TD: Tensor = yield from self._half.forward(x_TD, *rest)
        return y_TD


def tapped(decoder: Decoder, see: Callable[[Tensor], None]) -> Decoder:
    """The same decoder, which shows the residual stream before each layer and after the last."""
    layers = []
    for layer in decoder.layers:
        first = "mixer" if layer.mixer is not None else "ffn"
        layers.append(replace(layer, **{first: _Tap(getattr(layer, first), see)}))  # type: ignore[arg-type]

    def norm(x_TD: Tensor) -> Tensor:
        see(x_TD)
        return decoder.norm(x_TD)

    other = copy(decoder)
    other.layers, other.norm = tuple(layers), norm
    return other


def _greedy(model: LoadedModel, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    requests = [
        Request(
            request_id=str(i),
            prompt_ids=tuple(prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
            seed=0,
        )
        for i, prompt in enumerate(prompts)
    ]
    with open_engine(model, requests, max_tokens_per_step=512) as engine:
        answers = answer(engine, requests)
    return [list(answers[request.request_id].tokens) for request in requests]


if __name__ == "__main__":
    serve_job("engine", probe)
