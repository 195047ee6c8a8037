"""A loaded model driven by hand over a paged KV pool: the engine's data path without its scheduler."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moesaic.experts.contract import Observe, Tag
from moesaic.kv.pool import BatchLayout, KvPool
from moesaic.models.build import LoadedModel
from moesaic.sched.ledger import NO_BLOCK, cache_groups
from moesaic.sched.step import RowPlan
from moesaic.steps import drive


@dataclass(kw_only=True)
class Cached:
    """How many tokens of a sequence are in the pool, its blocks in each cache group, its two state slots."""

    num_tokens: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    states: list[int] = field(default_factory=list)  # the slot that is read next, then the one written


class PagedModel:
    """Sequences by name over one pool whose blocks are dealt out in a shuffled order.

    Blocks that a window has passed are hidden from the kernels, as the ledger hides them.
    """

    def __init__(self, model: LoadedModel, *, num_blocks: int = 64, seed: int = 0) -> None:
        self.model = model
        groups = len(cache_groups(model.spec, model.numerics.kv_format, model.numerics.kv_block))
        self.pool = KvPool(model.spec, model.numerics, (num_blocks,) * groups)
        self.sequences: dict[str, Cached] = {}
        self.step_id = 0
        self._free = [list(range(num_blocks)) for _ in range(groups)]
        for free in self._free:
            random.Random(seed).shuffle(free)

    @torch.inference_mode()
    def step(self, *rows: tuple[str, Sequence[int]], observe: Observe | None = None) -> list[Tensor]:
        """Compute the next tokens of some sequences in one batch; logits [n, V] of every token, per row."""
        plans = [self._plan(name, tokens) for name, tokens in rows]
        layout = BatchLayout.of(plans, self.pool)
        tokens_T = torch.tensor([token for _, tokens in rows for token in tokens], dtype=torch.int64)
        tag = Tag(epoch=0, plan_version=0, step_id=self.step_id, micro_batch=0, chunk=0, layer_idx=0)
        decoder = self.model.decoder
        [hidden_TD] = drive([decoder.forward(tokens_T, layout, self.pool, tag, observe)], 1.0)
        self.step_id += 1
        logits_TV = decoder.logits(hidden_TD)
        return list(logits_TV.split([len(tokens) for _, tokens in rows]))

    def run(self, name: str, tokens: Sequence[int], *, chunk: int | None = None) -> Tensor:
        """Logits [n, V] of the next tokens of one sequence, computed alone, so many at a time."""
        size = chunk or len(tokens)
        parts = [self.step((name, tokens[i : i + size]))[0] for i in range(0, len(tokens), size)]
        return torch.cat(parts)

    def fork(self, source: str, target: str, num_tokens: int) -> None:
        """Start a sequence on the first blocks of another: a prefix that is in the pool already."""
        kv_block = self.pool.kv_block
        assert num_tokens % kv_block == 0
        blocks = [group[: num_tokens // kv_block] for group in self.sequences[source].blocks]
        self.sequences[target] = Cached(num_tokens=num_tokens, blocks=blocks)

    def greedy(self, prompt: Sequence[int], num_tokens: int, *, chunk: int | None = None) -> list[int]:
        """The most likely tokens after a prompt, one by one; the first of equals."""
        name = f"greedy{self.step_id}"
        found = [int(self.run(name, prompt, chunk=chunk)[-1].argmax())]
        while len(found) < num_tokens:
            found.append(int(self.step((name, found[-1:]))[0][-1].argmax()))
        return found

    def _plan(self, name: str, tokens: Sequence[int]) -> RowPlan:
        kv_block = self.pool.kv_block
        sequence = self.sequences.setdefault(name, Cached(blocks=[[] for _ in self._free]))
        start = sequence.num_tokens
        sequence.num_tokens += len(tokens)
        for group, blocks, free in zip(self.pool.groups, sequence.blocks, self._free, strict=True):
            if group.kind == "state":
                sequence.states = sequence.states[::-1] or [free.pop(), free.pop()]
                continue
            while len(blocks) * kv_block < sequence.num_tokens:
                blocks.append(free.pop())
            passed = group.first_live_idx(start, kv_block)
            blocks[:passed] = [NO_BLOCK] * passed
        return RowPlan(
            request_id=name,
            start_idx=start,
            num_tokens=len(tokens),
            is_sampled=True,
            token_ids=tuple(tokens),
            blocks=tuple(tuple(blocks) for blocks in sequence.blocks),
            state_from=sequence.states[0] if sequence.states and start else None,
            state_to=sequence.states[1] if sequence.states else None,
        )


def random_tokens(num_tokens: int, vocab: int, *, seed: int) -> list[int]:
    """A prompt without structure."""
    return random.Random(seed).choices(range(vocab), k=num_tokens)
