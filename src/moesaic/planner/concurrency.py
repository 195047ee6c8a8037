"""Expert parallelism or not: which is faster at every concurrency, where they cross, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moesaic.cost.term import Cost, at, pick
from moesaic.planner.demand import Demand
from moesaic.planner.plan import critical
from moesaic.planner.pools import Refused, Rows, layout_name, serve_rows
from moesaic.planner.price import Pricer
from moesaic.planner.space import Block, Knob


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """A range of concurrency with one verdict.

    Units:  concurrency is requests in flight over all devices. gain is how much faster the way taken is than
            the other in the middle of the band, where the reason holds; None when the other does not fit.
    """

    concurrency_from: int
    concurrency_to: int
    use_ep: bool
    gain: float | None
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Point:
    concurrency: int
    best: Mapping[bool, tuple[float, int] | None]  # with EP or without: (tokens per second, row)
    rows: Rows

    @property
    def use_ep(self) -> bool:
        without, with_ep = self.best[False], self.best[True]
        return without is None or (with_ep is not None and with_ep[0] > without[0])


def bands(pricer: Pricer, blocks: Sequence[Block], demand: Demand) -> tuple[Band, ...]:
    """The verdict for every concurrency from 1 to the most that fits, by instances that serve both phases.

    Priced at powers of two, and by bisection where the verdict changes. Empty for a dense model.
    """
    if not pricer.model.moe_layers:
        return ()
    points: list[_Point] = []
    concurrency = 1
    while (point := _point(pricer, blocks, demand, concurrency)) is not None:
        if points and points[-1].use_ep != point.use_ep:
            points += _crossing(pricer, blocks, demand, points[-1], point)
        points.append(point)
        concurrency *= 2
    found: list[Band] = []
    for first, last in _runs(points):
        gain, reason = _why(pricer, demand, points[(first + last) // 2])
        start = 1 if not found else found[-1].concurrency_to + 1
        found.append(
            Band(
                concurrency_from=start,
                concurrency_to=points[last].concurrency,
                use_ep=points[first].use_ep,
                gain=gain,
                reason=reason,
            )
        )
    return tuple(found)


def rows_by_concurrency(pricer: Pricer, blocks: Sequence[Block], demand: Demand) -> Iterator[Rows]:
    """All that serves at 1, 2, 4, ... requests in flight, as long as something fits."""
    concurrency = 1
    while (point := _point(pricer, blocks, demand, concurrency)) is not None:
        yield point.rows
        concurrency *= 2


def _crossing(
    pricer: Pricer, blocks: Sequence[Block], demand: Demand, below: _Point, above: _Point
) -> list[_Point]:
    """The last point of one verdict and the first of the next, up to an eighth of their distance."""
    last, first = below, above
    for _ in range(3):
        middle = (last.concurrency + first.concurrency) // 2
        if middle in (last.concurrency, first.concurrency):
            break
        point = _point(pricer, blocks, demand, middle)
        if point is None:
            break
        last, first = (point, first) if point.use_ep == below.use_ep else (last, point)
    return [point for point in (last, first) if point is not below and point is not above]


def _runs(points: Sequence[_Point]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for idx, point in enumerate(points):
        if runs and points[runs[-1][0]].use_ep == point.use_ep:
            runs[-1] = runs[-1][0], idx
        else:
            runs.append((idx, idx))
    return runs


def _point(pricer: Pricer, blocks: Sequence[Block], demand: Demand, concurrency: int) -> _Point | None:
    asked = replace(demand, concurrency=concurrency, tpot_s=None, ttft_s=None, objective="per-gpu")
    rows = serve_rows(pricer, blocks, asked, Refused({}))
    if not len(rows):
        return None
    tokens = rows.rate * rows.count * demand.osl
    best: dict[bool, tuple[float, int] | None] = {}
    for use_ep in (False, True):
        value = np.where((rows.ep > 1) == use_ep, tokens, -1.0)
        idx = int(np.argmax(value))
        best[use_ep] = (float(value[idx]), idx) if value[idx] > 0 else None
    return _Point(concurrency=concurrency, best=best, rows=rows)


def _why(pricer: Pricer, demand: Demand, point: _Point) -> tuple[float | None, str]:
    """(gain, reason) of a verdict, from the terms of the best with EP and the best without."""
    use_ep, where = point.use_ep, f"at {point.concurrency} requests"
    taken, other = point.best[use_ep], point.best[not use_ep]
    if taken is None or other is None:
        way = "without" if use_ep else "with"
        return None, f"{where} no layout {way} expert parallelism fits"
    name = layout_name(_layout(point.rows, taken[1]))
    mine, theirs = (_seconds(_tree(pricer, demand, point.rows, one[1])) for one in (taken, other))
    saved = {term: theirs.get(term, 0.0) - mine.get(term, 0.0) for term in (*mine, *theirs)}
    most = max(saved, key=lambda term: saved[term])
    lost = min(saved, key=lambda term: saved[term])
    beaten = layout_name(_layout(point.rows, other[1]))
    text = f"{where} {name} over {beaten}: {_shown(most)} {saved[most] * 1e3:.3g} ms shorter"
    if saved[lost] < 0:
        text += f", {_shown(lost)} {-saved[lost] * 1e3:.3g} ms longer"
    return taken[0] / other[0] - 1.0, text


def _layout(rows: Rows, idx: int) -> Mapping[Knob, int]:
    block: Block = rows.blocks[rows.block_idx[idx]]
    return block.row(int(rows.row[idx]))


def _tree(pricer: Pricer, demand: Demand, rows: Rows, idx: int) -> tuple[Cost, Cost, float]:
    block = rows.blocks[rows.block_idx[idx]].take(np.array([rows.row[idx]]))
    stages = block.columns["pp"]
    decode = pricer.cost(block, rows.batch[idx : idx + 1], 1.0, demand.mean_context)
    new = demand.new_tokens
    prefill = pricer.cost(block, stages, float(new), float(demand.isl - new))
    waited = pricer.interference.prefill_in_decode
    between = waited * float(rows.batch[idx]) / demand.osl / pick(stages, 0)
    return at(decode, 0), at(prefill, 0), between


def _seconds(trees: tuple[Cost, Cost, float]) -> dict[str, float]:
    """Seconds of a token's time by term of the decode step, and prefills of neighbours as one."""
    decode, prefill, between = trees
    found: dict[str, float] = {"prefill": between * sum(seconds for seconds, _ in critical(prefill))}
    for seconds, term in critical(decode):
        found[term.name] = found.get(term.name, 0.0) + seconds
    return found


def _shown(term: str) -> str:
    return "prefill between steps" if term == "prefill" else term.replace("_", " ")
