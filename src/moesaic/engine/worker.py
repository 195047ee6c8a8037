"""Executes plans: forward, sampling, counting. Of a request it knows what `StepPlan.admitted` said.

Running a plan again leaves the same state behind: histories are written at the rows' own positions, grammars
are replayed from the history, random numbers come from (seed, position).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from moesaic.engine.batch import BatchObserver, Census, MicroBatch
from moesaic.engine.grammar import BoolArray, Grammars, Matcher
from moesaic.engine.runner import Runner
from moesaic.engine.sampler import Recipe, Sampler
from moesaic.errors import RequestError
from moesaic.parallel.meter import Meter
from moesaic.parallel.transport import Traffic
from moesaic.sched.request import Logprobs, Request
from moesaic.sched.step import RankStep, StepPlan, StepResult
from moesaic.spec.experts import ExpertLoad, FloatArray, IntArray
from moesaic.spec.model import ModelSpec

PROMPT_LOGIT_ROWS = 64  # guess: prompt rows whose logits are held at once; 64 rows of 150,000 are 38 MB
LOAD_SOURCE = "engine"


@dataclass(slots=True, eq=False)
class Track:
    """One request as the worker knows it: how to draw, and its tokens at their positions."""

    recipe: Recipe
    history: IntArray
    matcher: Matcher | None = None
    matched: list[int] = field(default_factory=list)  # tokens that the matcher has taken

    @classmethod
    def of(cls, request: Request, vocab: int) -> Track:
        """A request at its start."""
        return cls(recipe=Recipe.of(request, vocab), history=np.array(request.prompt_ids, dtype=np.int64))

    @property
    def request(self) -> Request:
        """As it was admitted."""
        return self.recipe.request

    def write(self, start_idx: int, token_ids: Sequence[int]) -> None:
        """Note the tokens at [start_idx, start_idx + n)."""
        end = start_idx + len(token_ids)
        if end > len(self.history):
            grown = np.zeros(max(end, 2 * len(self.history)), dtype=np.int64)
            grown[: len(self.history)] = self.history
            self.history = grown
        self.history[start_idx:end] = token_ids

    def allowed(self, position: int, grammars: Grammars) -> BoolArray | None:
        """The grammar's mask for the token at `position`; None without a grammar.

        Raises: RequestError when the grammar cannot be followed further.
        """
        if self.request.grammar is None:
            return None
        generated = self.history[len(self.request.prompt_ids) : position].tolist()
        if self.matcher is None or generated[: len(self.matched)] != self.matched:
            self.matcher, self.matched = grammars.compile(self.request.grammar), []
        for token_id in generated[len(self.matched) :]:
            self.matcher.advance(token_id)
            self.matched.append(token_id)
        return self.matcher.mask()


@dataclass(slots=True, eq=False)
class Outcome:
    """What one step's rows came to."""

    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    logprobs: dict[str, tuple[Logprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[Logprobs | None, ...]] = field(default_factory=dict)
    routes: dict[str, IntArray] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class Worker:
    """A rank of one attention replica."""

    def __init__(  # noqa: PLR0913 - each says one thing of the rank
        self,
        runner: Runner,
        spec: ModelSpec,
        *,
        grammars: Grammars | None = None,
        traces_routes: bool = False,
        replica_idx: int = 0,
        is_silent: bool = False,
        rank: int = 0,
        meter: Meter | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        """`meter` is the model's; `traffic` is with other ranks, None: there are none. `is_silent`: another
        rank of the replica computes the same rows and says what comes of them.
        """
        self._runner = runner
        self._vocab = spec.vocab
        self._num_experts = [moe.num_experts for _, moe in spec.moe_layers]
        self._sampler = Sampler(spec.vocab)
        self._grammars = grammars
        self._traces_routes = traces_routes
        self._replica_idx = replica_idx
        self._rank = rank
        self._meter = meter or Meter()
        self._traffic = traffic
        self._is_silent = is_silent
        self._tracks: dict[str, Track] = {}

    @property
    def num_tracked(self) -> int:
        """Requests that something is kept for."""
        return len(self._tracks)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop what is kept for these requests."""
        for request_id in request_ids:
            self._tracks.pop(request_id, None)

    def run(self, plan: StepPlan) -> StepResult:
        """Execute one step."""
        began_s, began_unix_s = time.perf_counter(), time.time()
        before = self._reading()
        self.forget(plan.retired)
        for request in plan.admitted:
            self._tracks[request.request_id] = Track.of(request, self._vocab)
        batches = list(self._micro_batches(plan))
        census = Census(self._num_experts, keeps_routes=self._traces_routes)
        observers = [census.observer(batch) for batch in batches]
        hidden = self._runner.forward(plan, batches, observers)
        forward_s = time.perf_counter()
        outcome = Outcome()
        for batch, hidden_TD, observer in zip(batches, hidden, observers, strict=True):
            if self._is_silent:
                break
            self._sample(batch, hidden_TD, outcome)
            self._score_prompts(batch, hidden_TD, outcome)
            self._trace(batch, observer, outcome)
        ended_s = time.perf_counter()
        spent = self._reading() - before
        return StepResult(
            step_id=plan.step_id,
            tokens=outcome.tokens,
            logprobs=outcome.logprobs,
            prompt_logprobs=outcome.prompt_logprobs,
            loads=()
            if self._is_silent
            else self._loads(census, plan.plan_version, began_unix_s, began_unix_s + ended_s - began_s),
            spread={"forward": forward_s - began_s, "sample": ended_s - forward_s},
            ranks=(self._rank_step(spent, ended_s - began_s),),
            routes=outcome.routes,
            failed=outcome.failed,
        )

    def _reading(self) -> FloatArray:
        """Jobs, seconds of transfer and of waiting, and bytes sent to each rank, all since the start."""
        found, traffic = self._meter.read(), self._traffic
        if traffic is None:
            return np.array([found.num_jobs, found.transfer_s, found.wait_s, 0.0])
        sent_W, wait_s = traffic.send_bytes + traffic.collect_bytes, found.wait_s + traffic.wait_s
        return np.array([found.num_jobs, found.transfer_s, wait_s, *sent_W.tolist()])

    def _rank_step(self, spent: FloatArray, step_s: float) -> RankStep:
        num_jobs, transfer_s, wait_s, *sent_bytes = spent.tolist()
        return RankStep(
            rank=self._rank,
            num_jobs=int(num_jobs),
            sent_bytes=tuple(map(int, sent_bytes)),
            compute_s=max(step_s - transfer_s - wait_s, 0.0),
            transfer_s=transfer_s,
            wait_s=wait_s,
        )

    def _micro_batches(self, plan: StepPlan) -> Iterator[MicroBatch]:
        batch = plan.batches[self._replica_idx]
        for part in batch.micro_batches:
            rows = batch.rows[part]
            tracks = [self._tracks[row.request_id] for row in rows]
            for row, track in zip(rows, tracks, strict=True):
                track.write(row.start_idx, row.token_ids)
            yield MicroBatch.of(rows, [len(track.request.prompt_ids) for track in tracks])

    def _sample(self, batch: MicroBatch, hidden_TD: Tensor, outcome: Outcome) -> None:
        sampled = [(i, row) for i, row in enumerate(batch.rows) if row.is_sampled]
        if not sampled:
            return
        last_B = np.array([batch.row_span(i).stop - 1 for i, _ in sampled], dtype=np.int64)
        logits_BV = self._runner.logits(hidden_TD, last_B)
        for logits_V, (_, row) in zip(logits_BV, sampled, strict=True):
            track = self._tracks[row.request_id]
            position = row.start_idx + row.num_tokens
            try:
                allowed_V = track.allowed(position, self._grammars) if self._grammars is not None else None
            except RequestError as error:
                outcome.failed[row.request_id] = str(error)
                continue
            drawn = self._sampler.draw(logits_V, track.recipe, track.history[:position], allowed_V)
            if drawn.token_id is None:
                outcome.failed[row.request_id] = f"{drawn.failure} (position {position})"
                continue
            outcome.tokens[row.request_id] = (drawn.token_id,)
            if drawn.logprobs is not None:
                outcome.logprobs[row.request_id] = (drawn.logprobs,)

    def _score_prompts(self, batch: MicroBatch, hidden_TD: Tensor, outcome: Outcome) -> None:
        """Log probabilities of the prompt tokens that follow the positions computed here."""
        for i, row in enumerate(batch.rows):
            track = self._tracks[row.request_id]
            num_top = track.request.sampling.prompt_logprobs
            end = min(row.start_idx + row.num_tokens, len(track.request.prompt_ids) - 1)
            if num_top is None or end <= row.start_idx:
                continue
            found: list[Logprobs | None] = []
            for start in range(row.start_idx, end, PROMPT_LOGIT_ROWS):
                stop = min(start + PROMPT_LOGIT_ROWS, end)
                rows_B = np.arange(start, stop, dtype=np.int64) - row.start_idx + batch.offsets[i]
                logits_BV = self._runner.logits(hidden_TD, rows_B)
                for logits_V, token_id in zip(logits_BV, track.history[start + 1 : stop + 1], strict=True):
                    if not np.isfinite(logits_V.max()):
                        outcome.failed[row.request_id] = "the model's logits over the prompt are not finite"
                        break
                    found.append(self._sampler.logprobs(logits_V, int(token_id), num_top))
            outcome.prompt_logprobs[row.request_id] = tuple(found)

    def _trace(self, batch: MicroBatch, observer: BatchObserver, outcome: Outcome) -> None:
        routes = observer.routes()
        if routes is not None:
            for i, row in enumerate(batch.rows):
                outcome.routes[row.request_id] = routes[batch.row_span(i)]

    def _loads(
        self, census: Census, plan_version: int, since_s: float, until_s: float
    ) -> tuple[ExpertLoad, ...]:
        return tuple(
            ExpertLoad(
                counts=tuple(counts),
                phase=phase,
                num_tokens=census.num_tokens[phase],
                num_steps=1,
                since_s=since_s,
                until_s=until_s,
                plan_version=plan_version,
                source=LOAD_SOURCE,
            )
            for phase, counts in census.counts.items()
        )
