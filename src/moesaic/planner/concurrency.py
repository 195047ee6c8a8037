"""Expert parallelism or not: which is better at every concurrency, where they cross, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from moesaic.planner.compare import CLOSE, Ranking, why_taken
from moesaic.planner.demand import Demand
from moesaic.planner.plan import Plan
from moesaic.planner.pools import layout_name

GROWTH = 4  # concurrency is first tried at powers of this
LEAST_GAIN = 0.005  # less is shown as 0 %, and no single part of it as anything
HALVINGS = 3  # where the verdict changes between two of them, their distance is halved this often


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """A range of concurrency with one verdict.

    Units:  concurrency is requests in flight over all devices. gain is how much more the way taken is worth
            by the objective than the other, where the reason holds: at the answer's concurrency if that is
            in the band, else in its middle; None when the other cannot serve what is asked.
    """

    concurrency_from: int
    concurrency_to: int
    use_ep: bool
    gain: float | None
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Which way is taken at one concurrency. `plans` are the best and the best of the other way."""

    concurrency: int
    demand: Demand
    use_ep: bool
    is_answer: bool
    plans: Callable[[], tuple[Plan, Plan | None]]

    @staticmethod
    def of_answer(best: Plan, other: Plan | None, demand: Demand) -> Verdict:
        """The answer's own, at the concurrency asked for or, without one, that of its best plan."""
        return Verdict(
            concurrency=demand.concurrency or best.num_sequences, demand=demand, use_ep=best.use_ep,
            is_answer=True, plans=lambda: (best, other),
        )  # fmt: skip

    @staticmethod
    def of_ranking(ranking: Ranking, demand: Demand, concurrency: int) -> Verdict:
        """That of all deployments at one concurrency, which `demand` asks for."""

        def plans() -> tuple[Plan, Plan | None]:
            other = ranking.other_way
            return ranking.plan(ranking.best), None if other is None else ranking.plan(other)

        return Verdict(
            concurrency=concurrency, demand=demand, use_ep=ranking.use_ep, is_answer=False, plans=plans
        )


def bands(ranked: Callable[[int], Ranking | None], answer: Verdict) -> tuple[Band, ...]:
    """The verdict for every concurrency from 1 to the most that is served.

    `ranked(concurrency)` ranks all deployments; None when nothing serves so many. The answer's verdict is one
    of the points.
    """

    def point(concurrency: int) -> Verdict | None:
        if concurrency == answer.concurrency:
            return answer
        ranking = ranked(concurrency)
        asked = replace(answer.demand, concurrency=concurrency)
        return None if ranking is None else Verdict.of_ranking(ranking, asked, concurrency)

    found: dict[int, Verdict] = {answer.concurrency: answer}
    concurrency = 1
    while (tried := point(concurrency)) is not None or concurrency < answer.concurrency:
        if tried is not None:
            found[concurrency] = tried
        concurrency *= GROWTH
    points = [found[one] for one in sorted(found)]
    for below, above in list(pairwise(points)):
        if below.use_ep != above.use_ep:
            points += _crossing(point, below, above)
    return _joined(sorted(points, key=lambda one: one.concurrency))


def alone(best: Plan, demand: Demand, unjoined: Sequence[str]) -> Band:
    """The verdict where every instance is one device; `unjoined` are clusters of several that nothing
    joins."""
    reason = "one device"
    if unjoined:
        reason += f" an instance: the file of {unjoined[0]} names neither link nor host link between them"
    return Band(
        concurrency_from=1, concurrency_to=demand.concurrency or best.num_sequences, use_ep=False, gain=None,
        reason=reason,
    )  # fmt: skip


def _crossing(point: Callable[[int], Verdict | None], below: Verdict, above: Verdict) -> list[Verdict]:
    """Points between two of different verdicts, the last two of them near where it changes."""
    found: list[Verdict] = []
    for _ in range(HALVINGS):
        middle = (below.concurrency + above.concurrency) // 2
        tried = point(middle) if middle != below.concurrency else None
        if tried is None:
            break
        found.append(tried)
        below, above = (tried, above) if tried.use_ep == below.use_ep else (below, tried)
    return found


def _joined(points: Sequence[Verdict]) -> tuple[Band, ...]:
    runs: list[list[Verdict]] = []
    for one in points:
        if runs and runs[-1][0].use_ep == one.use_ep:
            runs[-1].append(one)
        else:
            runs.append([one])
    found: list[Band] = []
    for run in runs:
        shown = next((one for one in run if one.is_answer), run[len(run) // 2])
        gain, reason = _why(shown)
        found.append(
            Band(
                concurrency_from=found[-1].concurrency_to + 1 if found else 1,
                concurrency_to=run[-1].concurrency, use_ep=run[0].use_ep, gain=gain, reason=reason,
            )
        )  # fmt: skip
    return tuple(found)


def _why(verdict: Verdict) -> tuple[float | None, str]:
    """(gain, reason) of a verdict: what argues for the plan taken, and the largest part that does not."""
    where = f"at {verdict.concurrency} requests"
    taken, other = verdict.plans()
    if other is None:
        way = "without" if verdict.use_ep else "with"
        return None, f"{where} no layout {way} expert parallelism serves what is asked"
    ratio = taken.value / other.value
    text = f"{where} {_name(taken)} over {_name(other)}: "
    gain = max(ratio - 1.0, 0.0)
    if ratio < 1.0 - CLOSE:
        return gain, f"{text}{1.0 - ratio:.1%} less, but nearer to what no layout meets"
    if ratio < 1.0 + LEAST_GAIN:
        more = f"{abs(ratio - 1.0):.1%} {'more' if gain else 'less'}"
        apart = "as much" if more.startswith("0.0%") else more
        return gain, f"{text}{apart}, and what is within {CLOSE:.0%} is equal: {why_taken(taken, other)}"
    return gain, text + _argument(taken, other, verdict.demand)


def _argument(taken: Plan, other: Plan, demand: Demand) -> str:
    """The largest of the factors by which a plan is worth more: time, sequences, devices, prefill."""
    if not demand.num_steps:
        return _terms(taken, other)
    speed = other.token_s / taken.token_s
    ttft_s = [float(one.ttft.value) for one in (taken, other)]
    if demand.objective == "latency":
        saved_s = demand.num_steps * (other.token_s - taken.token_s)
        if saved_s >= ttft_s[1] - ttft_s[0]:
            return _terms(taken, other)
        return f"TTFT {ttft_s[0] * 1e3:.3g} instead of {ttft_s[1] * 1e3:.3g} ms"
    flights = [demand.concurrency or one.num_sequences for one in (taken, other)]
    devices = [sum(count for _, count in one.charged) for one in (taken, other)]
    costs = [one.tokens_per_s / one.value for one in (taken, other)]
    rates = [one.tokens_per_s * one.token_s / held for one, held in zip((taken, other), flights, strict=True)]
    factors = {
        "speed": speed, "flights": flights[0] / flights[1], "cost": costs[1] / costs[0],
        "prefill": rates[0] / rates[1],
    }  # fmt: skip
    best = max(factors, key=lambda name: factors[name])
    if best == "speed":
        return _terms(taken, other)
    return {
        "flights": f"{flights[0]} requests in flight instead of {flights[1]} within memory and objectives",
        "cost": f"less to pay for: {devices[0]} devices instead of {devices[1]}",
        "prefill": f"decoding waits for prompts less: {rates[0]:.1%} of its pace instead of {rates[1]:.1%}",
    }[best]


def _terms(taken: Plan, other: Plan) -> str:
    """Where a shorter time per token comes from."""
    mine, theirs = _seconds(taken), _seconds(other)
    saved = {term: theirs.get(term, 0.0) - mine.get(term, 0.0) for term in (*theirs, *mine)}
    most = max(saved, key=lambda term: saved[term])
    lost = min(saved, key=lambda term: saved[term])
    name = "a prompt's time" if taken.tpot is None else "TPOT"
    text = f"{name} {taken.token_s * 1e3:.3g} instead of {other.token_s * 1e3:.3g} ms, "
    text += f"{_shown(most)} {saved[most] * 1e3:.3g} ms shorter"
    return text + (f", {_shown(lost)} {-saved[lost] * 1e3:.3g} ms longer" if saved[lost] < 0 else "")


def _name(plan: Plan) -> str:
    sides = " + ".join(layout_name(pool.layout) for pool in plan.pools if pool.role != "prefill")
    return sides + (" beside prefill" if plan.pools[0].role == "prefill" else "")


def _seconds(plan: Plan) -> dict[str, float]:
    """Seconds of a token's time by term."""
    found: dict[str, float] = {}
    for name, _, seconds in plan.breakdown():
        found[name] = found.get(name, 0.0) + seconds
    return found


def _shown(term: str) -> str:
    return "prefill between steps" if term == "prefill" else term.replace("_", " ")
