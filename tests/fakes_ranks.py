"""Drivers that run the ranks of one thread in any order, and any choice of copies."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from moesaic.spec.experts import ExpertPlan
from moesaic.steps import IDLE_ROUNDS, Steps, Wait

T = TypeVar("T")


def random_copies(plan: ExpertPlan, at: int, rng: np.random.Generator, num_variants: int = 3) -> Tensor:
    """[E, V]: in each variant any copy of each expert."""
    slots = plan.slot_expert[at]
    copies = [np.flatnonzero(slots == expert) for expert in range(slots.max() + 1)]
    return torch.tensor([[int(rng.choice(slots_of)) for _ in range(num_variants)] for slots_of in copies])


def in_turns(steps: Sequence[Steps[T]]) -> Steps[list[T]]:
    """`steps.drive` as a generator: one rank with its micro-batches, its waits passed on."""
    results: dict[int, T] = {}
    waits: dict[int, Wait] = {}
    while len(results) < len(steps):
        for i, step in enumerate(steps):
            if i in results:
                continue
            if i in waits:
                yield waits[i]
            try:
                waits[i] = next(step)
            except StopIteration as end:
                results[i] = end.value
    return [results[i] for i in range(len(steps))]


def drive_shuffled(steps: Sequence[Steps[T]], seed: int) -> list[T]:
    """Run generators to their ends, moving any that can move: any order in which messages might arrive."""
    rng = random.Random(seed)
    results: dict[int, T] = {}
    waits: dict[int, Wait] = {}
    while len(results) < len(steps):
        for _ in range(1 + IDLE_ROUNDS):
            movable = [
                i for i in range(len(steps)) if i not in results and (i not in waits or waits[i].ready())
            ]
            if movable:
                break
        assert movable, f"deadlock: {sorted(set(range(len(steps))) - set(results))} wait and none can move"
        i = rng.choice(movable)
        try:
            waits[i] = next(steps[i])
        except StopIteration as end:
            results[i] = end.value
    return [results[i] for i in range(len(steps))]
