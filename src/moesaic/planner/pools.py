"""Rows of priced pools: every layout with its batch as a server of both phases, of prefill, or of decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from moesaic.cost.serving import prefill_beside_decode
from moesaic.cost.term import Cost, FloatArray, Number, step_seconds
from moesaic.planner.demand import Demand
from moesaic.planner.price import PREFILL_TOKENS, PoolRole, Pricer, largest_within
from moesaic.planner.space import Block, Knob, NearMiss
from moesaic.units import format_bytes

MAX_SECONDS = 1e9  # where no objective limits a step


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """Layouts that hold their objectives, each with the best batch it may have.

    Shapes:  every array is [n]; block_idx and row say which layout of which block it is.
    Units:   rate is finished requests per second of one instance; devices are those of one instance.
    """

    role: PoolRole
    blocks: Sequence[Block]
    block_idx: np.ndarray
    row: np.ndarray
    devices: FloatArray
    ep: FloatArray
    stages: FloatArray
    batch: FloatArray  # sequences (prefill: prompts) of one attention replica
    count: FloatArray  # instances; 0: as many as there is room for
    rate: FloatArray
    tpot_s: FloatArray
    ttft_s: FloatArray

    def __len__(self) -> int:
        return len(self.row)

    def take(self, chosen: np.ndarray) -> Rows:
        """Some of the rows."""
        arrays = {name: getattr(self, name)[chosen] for name in _ARRAYS}
        return Rows(role=self.role, blocks=self.blocks, **arrays)


_ARRAYS = ("block_idx", "row", "devices", "ep", "stages", "batch", "count", "rate", "tpot_s", "ttft_s")


class Refused:
    """What was ruled out and why: a count and the nearest miss of each reason."""

    def __init__(self, misses: Mapping[str, NearMiss]) -> None:
        self.misses: dict[str, NearMiss] = dict(misses)

    def add(
        self, reason: str, block: Block, wrong: np.ndarray, distance: Number, text: str, scale: Number
    ) -> None:
        """Count `wrong` layouts; the one with the least distance is the nearest. `{}` of the text is its
        scale."""
        if not wrong.any():
            return
        ratio = np.where(wrong, np.broadcast_to(np.asarray(distance, np.float64), wrong.shape), np.inf)
        idx = int(np.argmin(ratio))
        shown = float(np.broadcast_to(np.asarray(scale, np.float64), wrong.shape)[idx])
        size = format_bytes(shown) if reason == "memory" else f"{shown:.4g}"
        miss = NearMiss(
            count=int(wrong.sum()), nearest=f"{layout_name(block.row(idx))}: {text.format(size)}",
            distance=float(ratio[idx]),
        )  # fmt: skip
        self.count(reason, miss)

    def count(self, reason: str, miss: NearMiss) -> None:
        """Add to what a reason ruled out."""
        self.misses[reason] = miss if reason not in self.misses else self.misses[reason].joined(miss)


def layout_name(layout: Mapping[Knob, int]) -> str:
    """`tp 8 ep 32 dp 4`: what differs from one device without redundancy."""
    names: dict[str, str] = {
        "expert_tp": "expert tp",
        "num_micro_batches": "micro-batches",
        "num_redundant": "redundant",
        "num_offloaded": "offloaded",
    }
    plain: dict[str, int] = {"num_redundant": 0, "num_offloaded": 0}
    shown = [f"{names.get(knob, knob)} {size}" for knob, size in layout.items() if size != plain.get(knob, 1)]
    return " ".join(shown) or "one device"


def serve_rows(pricer: Pricer, blocks: Sequence[Block], demand: Demand, refused: Refused) -> Rows:
    """Instances that prefill and decode: a step of decoding, and between steps the prompts of new requests.

    A request costs its instance a prefill and osl steps of decoding; its tokens come as much later as the
    prefills of its neighbours take.
    """
    found = []
    for block_idx, whole in enumerate(blocks):
        most, least_bytes = _most(pricer, whole, "serve", demand)
        _refuse_memory(pricer, whole, most, least_bytes, refused)
        part = np.flatnonzero(most >= whole.unit)
        block, most = whole.take(part), most[part]
        tree, first = pricer.once(
            ("first", whole, demand.traffic), partial(_first_prompts, pricer, block, demand)
        )
        count = np.floor(pricer.cluster.num_devices / block.devices)
        level = pricer.level_of(whole, demand, "serve")
        times = _Times(
            pricer=pricer, block=block, demand=demand, count=count, tree=tree, first=first, level=level
        )
        batch, tpot_s = _batches(
            block, most, times.tpot, demand, count, refused,
            times.tpot if demand.ttft_s is None else times.late,
        )  # fmt: skip
        every = np.arange(len(block))
        own_s, others_s = times.prompts(every, np.maximum(batch, block.unit))
        step_s = tpot_s - others_s / demand.osl if demand.num_steps else tpot_s
        ttft_s = pricer.first_token_s(first, step_s)
        keep = (batch > 0) & _keeps_ttft(block, ttft_s, batch > 0, demand, refused)
        busy_s = demand.num_steps * step_s + others_s + own_s
        rate = _active(block, batch, demand, count) / np.maximum(busy_s, 1e-12)
        found.append(_rows("serve", blocks, block_idx, part, keep, batch, count, rate, tpot_s, ttft_s))
    return _joined(found)


def decode_rows(
    pricer: Pricer, blocks: Sequence[Block], demand: Demand, refused: Refused, counts: Sequence[int]
) -> Rows:
    """Instances that only decode. `counts` are the numbers of instances tried where concurrency is given."""
    found = []
    for block_idx, whole in enumerate(blocks):
        every, least_bytes = _most(pricer, whole, "decode", demand)
        _refuse_memory(pricer, whole, every, least_bytes, refused)
        tried = np.array(counts if demand.concurrency is not None else [0], np.float64)
        fits = tried[:, None] * whole.devices <= pricer.cluster.num_devices
        which, part = np.nonzero(fits & (every >= whole.unit))
        block, count = whole.take(part), tried[which]

        def tpot(rows: np.ndarray, batch: FloatArray, block: Block = block) -> FloatArray:
            return np.asarray(pricer.decode_interval(block.take(rows), batch, demand).value)

        batch, tpot_s = _batches(block, every[part], tpot, demand, count, refused)
        rate = _active(block, batch, demand, count) / (demand.osl * np.maximum(tpot_s, 1e-12))
        none = np.zeros_like(rate)
        found.append(_rows("decode", blocks, block_idx, part, batch > 0, batch, count, rate, tpot_s, none))
    return _joined(found)


def prefill_rows(
    pricer: Pricer, blocks: Sequence[Block], demand: Demand, refused: Refused, is_far: bool
) -> Rows:
    """Instances that only prefill, with as many prompts a step as time to first token and memory allow.

    `is_far`: KV is handed over through the network.
    """
    found = []
    for block_idx, block in enumerate(blocks):
        unit = block.columns["pp"]
        level = pricer.level_of(block, demand, "prefill")
        hand_over = pricer.first_token_s(pricer.hand_over_s(block, demand, is_far), 0.0)
        batch, ttft_s, rate = (np.zeros(len(block)) for _ in range(3))
        many = 1
        while many * demand.new_tokens <= max(demand.new_tokens, PREFILL_TOKENS):
            prompts = unit * many
            used = np.asarray(sum(pricer.memory(block, prompts, "prefill", demand).values()))
            fits = used <= pricer.usable_bytes
            step_s = np.asarray(pricer.prefill_interval(block, prompts, demand).value)
            if many == 1:
                refused.add("memory", block, ~fits, used / pricer.usable_bytes, _memory_text(pricer), used)
                is_fast = _keeps_ttft(block, step_s + hand_over, fits, demand, refused)
            better = fits & (step_s + hand_over <= (demand.ttft_s or MAX_SECONDS))
            faster = prompts * block.columns["dp"] / (step_s * level)
            better &= (faster > rate) if demand.objective != "latency" or many == 1 else False
            batch, rate = np.where(better, prompts, batch), np.where(better, faster, rate)
            ttft_s = np.where(better, step_s + hand_over, ttft_s)
            many *= 2
        keep, every = (batch > 0) & is_fast, np.arange(len(block))
        count = none = np.zeros(len(block))
        found.append(_rows("prefill", blocks, block_idx, every, keep, batch, count, rate, none, ttft_s))
    return _joined(found)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Times:
    """Times of instances that do both, by (rows of the block, batch).

    Shapes:  count and first are [n], tree is over [n]: a prompt a stage, and its seconds; `level` is how much
             longer tokens were measured to take, which waited for prompts too.
    """

    pricer: Pricer
    block: Block
    demand: Demand
    count: FloatArray
    tree: Cost
    first: FloatArray
    level: float

    def prompts(self, rows: np.ndarray, batch: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Seconds of a request's own prompt, and of those of the others in flight on its replica."""
        part, own = self.block.take(rows), self.pricer.interference
        in_flight = _active(part, batch, self.demand, self.count[rows]) / part.columns["dp"]
        busy = np.minimum(part.columns["pp"], np.maximum(in_flight, 1.0))  # stages with a prompt
        beside = prefill_beside_decode(self.tree, np.maximum(in_flight, 1.0), own, rows) / busy
        one_s = np.where(in_flight > 1, beside, self.first[rows] / busy)  # alone it shares no step
        one_s = one_s * self.level
        return one_s, one_s * np.maximum(in_flight - 1.0, 0.0)

    def step(self, rows: np.ndarray, batch: FloatArray) -> FloatArray:
        """Seconds of a decode step."""
        return np.asarray(
            self.pricer.decode_interval(self.block.take(rows), batch, self.demand, "serve").value
        )

    def tpot(self, rows: np.ndarray, batch: FloatArray) -> FloatArray:
        """Seconds per token: a step, and the neighbours' prompts spread over an answer's."""
        others_s = self.prompts(rows, batch)[1] if self.demand.num_steps else 0.0
        return np.asarray(self.step(rows, batch) + others_s / self.demand.osl)

    def late(self, rows: np.ndarray, batch: FloatArray) -> FloatArray:
        """Time per token, or time to first token on the scale of its own limit: whichever is nearer to it."""
        tpot_s = self.tpot(rows, batch)
        ttft_s = self.pricer.first_token_s(self.first[rows], self.step(rows, batch))
        scale = (self.demand.tpot_s or MAX_SECONDS) / (self.demand.ttft_s or MAX_SECONDS)
        return np.asarray(np.maximum(tpot_s, ttft_s * scale))


def _first_prompts(pricer: Pricer, block: Block, demand: Demand) -> tuple[Cost, FloatArray]:
    """A prompt a stage: the tree and its seconds."""
    tree = pricer.prefill_cost(block, block.columns["pp"], demand)
    return tree, np.broadcast_to(np.asarray(step_seconds(tree).value), (len(block),))


def _most(pricer: Pricer, block: Block, role: PoolRole, demand: Demand) -> tuple[FloatArray, FloatArray]:
    return pricer.once((role, block, demand.traffic), lambda: pricer.largest_batch(block, role, demand))


def _batches(
    block: Block,
    most: FloatArray,
    tpot: Callable[[np.ndarray, FloatArray], FloatArray],
    demand: Demand,
    count: FloatArray,
    refused: Refused,
    late: Callable[[np.ndarray, FloatArray], FloatArray] | None = None,
) -> tuple[FloatArray, FloatArray]:
    """(batch, time per token): the largest batch in time, or the one that the concurrency asks for; or 0.

    `late` is what has to be within the limit where that is more than the time per token; a layout that is
    late with any batch but not in time per token gets the least one.
    """
    late = late or tpot
    unit, every = block.unit, np.arange(len(block))
    limit = demand.tpot_s or MAX_SECONDS
    batch = np.zeros(len(block))
    if demand.concurrency is not None:
        replicas = np.maximum(count * block.columns["dp"], 1)
        needed = np.ceil(demand.concurrency / replicas / unit) * unit
        short = (most >= unit) & (needed > most)
        text = "room for {} sequences a replica"
        refused.add("concurrency", block, short, needed / np.maximum(most, 1), text, most)
        rows = np.flatnonzero(needed <= most)
        batch[rows] = needed[rows]
    elif demand.objective == "latency":
        batch = np.where(most >= unit, unit, 0.0)
    elif late is tpot and demand.tpot_s is None:
        batch = most.copy()
    else:
        batch = largest_within(late, most, unit, limit)
        batch = np.where((batch == 0) & (most >= unit) & (late is not tpot), unit, batch)
    seconds = np.asarray(tpot(every, np.maximum(batch, unit)))
    slow = (seconds > limit) & (most >= unit if demand.concurrency is None else batch > 0)
    refused.add("tpot", block, slow, seconds / limit, "{} ms a token", seconds * 1e3)
    return np.where(slow, 0.0, batch), seconds


def _active(block: Block, batch: FloatArray, demand: Demand, count: FloatArray) -> FloatArray:
    """Sequences that one instance works on: all it has room for, or its part of the concurrency."""
    full = batch * block.columns["dp"]
    if demand.concurrency is None:
        return full
    return np.asarray(np.minimum(full, demand.concurrency / np.maximum(count, 1)))


def _keeps_ttft(
    block: Block, ttft_s: FloatArray, candidates: np.ndarray, demand: Demand, refused: Refused
) -> np.ndarray:
    if demand.ttft_s is None:
        return np.full(len(block), True)
    slow = candidates & (ttft_s > demand.ttft_s)
    refused.add("ttft", block, slow, ttft_s / demand.ttft_s, "{} ms to the first token", ttft_s * 1e3)
    return ~slow


def _memory_text(pricer: Pricer) -> str:
    return f"{{}} a device of {format_bytes(pricer.usable_bytes)} usable"


def _refuse_memory(
    pricer: Pricer, block: Block, most: FloatArray, least_bytes: FloatArray, refused: Refused
) -> None:
    refused.add("memory", block, most < block.unit, least_bytes / pricer.usable_bytes, _memory_text(pricer),
                least_bytes)  # fmt: skip


def _rows(
    role: PoolRole, blocks: Sequence[Block], block_idx: int, part: np.ndarray, keep: np.ndarray,
    *arrays: FloatArray,
) -> Rows:  # fmt: skip
    """`part` are rows of the block, `keep` and the arrays go along with them."""
    block, row = blocks[block_idx], part[keep]
    batch, count, rate, tpot_s, ttft_s = (array[keep] for array in arrays)
    return Rows(
        role=role, blocks=blocks, block_idx=np.full(len(row), block_idx), row=row, devices=block.devices[row],
        ep=block.columns["ep"][row], stages=block.columns["pp"][row], batch=batch, count=count, rate=rate,
        tpot_s=tpot_s, ttft_s=ttft_s,
    )  # fmt: skip


def _joined(found: Sequence[Rows]) -> Rows:
    arrays = {name: np.concatenate([getattr(one, name) for one in found]) for name in _ARRAYS}
    return Rows(role=found[0].role, blocks=found[0].blocks, **arrays)
