"""One request on its way: its tokens so far, how many are computed, and when it is done."""

from __future__ import annotations

from dataclasses import dataclass, field

from moesaic.sched.key import KvKey
from moesaic.sched.ledger import Grant
from moesaic.sched.request import FinishReason, Logprobs, Request, RequestEvent
from moesaic.sched.step import RowPlan, StepResult


@dataclass(kw_only=True, slots=True, eq=False)
class SequenceState:
    """A live request. `order` is class, then arrival: the smaller runs first and is preempted last."""

    request: Request
    arrival_idx: int
    added_s: float
    replica_idx: int
    root: KvKey  # of the key scope with the request's salt
    limit: int  # total tokens, prompt included, at which it ends with "length"
    order: tuple[int, int] = field(init=False)
    token_ids: list[int] = field(init=False)  # prompt and generated
    num_prompt: int = field(init=False)
    num_computed: int = 0  # leading tokens whose KV is in the pool, by committed steps
    num_cached: int | None = None  # prompt tokens found in the prefix cache at first admission
    keys: list[KvKey] = field(default_factory=list)  # of the full blocks, as far as they were needed
    grant: Grant | None = None  # None: waiting
    state_turn: int = 0  # which of the two state slots is written next
    is_in_flight: bool = False  # a row of it is in an uncommitted plan
    is_cancelled: bool = False
    is_known: bool = False  # the ranks have seen the request
    is_counted: bool = False  # its prompt is in the totals
    prompt_logprobs: list[Logprobs | None] | None = field(init=False)  # None: not asked for, or delivered

    def __post_init__(self) -> None:
        self.order = (self.request.priority, self.arrival_idx)
        self.token_ids = list(self.request.prompt_ids)
        self.num_prompt = len(self.token_ids)
        self.prompt_logprobs = None if self.request.sampling.prompt_logprobs is None else [None]

    @property
    def num_left(self) -> int:
        """Known tokens not yet computed; 1 means decode."""
        return len(self.token_ids) - self.num_computed

    def row(self, num_tokens: int, kv_block: int) -> RowPlan:
        """The next `num_tokens` tokens as a row; the grant must reach them."""
        grant, start, total = self.grant, self.num_computed, len(self.token_ids)
        assert grant is not None, f"{self.request.request_id} is planned without a grant"
        end = start + num_tokens
        slots = grant.state_slots
        return RowPlan(
            request_id=self.request.request_id,
            start_idx=start,
            num_tokens=num_tokens,
            is_sampled=end == total and total < self.limit,
            token_ids=tuple(self.token_ids[start:end]),
            blocks=grant.blocks(end, kv_block),
            state_from=slots[1 - self.state_turn] if slots and start > 0 else None,
            state_to=slots[self.state_turn] if slots else None,
        )

    def rewind(self) -> None:
        """Forget what was computed, as preemption by recompute does; tokens and delivered events stay."""
        self.num_computed = 0
        self.grant = None
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    def absorb(self, row: RowPlan, result: StepResult) -> RequestEvent | None:
        """Take in what a committed step computed for this row; None: nothing to tell."""
        request_id = row.request_id
        self.num_computed = row.start_idx + row.num_tokens
        self.state_turn = 1 - self.state_turn
        if self.prompt_logprobs is not None:
            # Only the first position has none, and the list starts with it.
            self.prompt_logprobs.extend(
                x for x in result.prompt_logprobs.get(request_id, ()) if x is not None
            )
        tokens: tuple[int, ...] = ()
        reason: FinishReason | None = None
        stop_token_id: int | None = None
        if row.is_sampled:
            tokens = result.tokens[request_id]
            assert len(tokens) == 1, f"{request_id}: a sampled row yields one token, got {len(tokens)}"
            if self._is_stop(tokens[0]):
                reason, stop_token_id = "stop", tokens[0]
            self.token_ids.append(tokens[0])
            if reason is None and len(self.token_ids) >= self.limit:
                reason = "length"
        elif self.num_left == 0:  # only the prompt was wanted
            reason = "length"
        routes = result.routes.get(request_id)
        if not tokens and reason is None and routes is None:
            return None
        return RequestEvent(
            request_id=request_id,
            token_ids=tokens,
            logprobs=result.logprobs.get(request_id, ()),
            prompt_logprobs=self._take_prompt_logprobs() if tokens or reason is not None else None,
            finish_reason=reason,
            stop_token_id=stop_token_id,
            num_cached_tokens=self.num_cached or 0,
            routes=routes,
        )

    def ended(self, reason: FinishReason, error: str | None = None) -> RequestEvent:
        """The last event of a request that ends without a token."""
        return RequestEvent(
            request_id=self.request.request_id,
            finish_reason=reason,
            num_cached_tokens=self.num_cached or 0,
            error=error,
        )

    def _is_stop(self, token_id: int) -> bool:
        """Whether this token, not yet appended, ends the request."""
        sampling = self.request.sampling
        if len(self.token_ids) - self.num_prompt < sampling.min_tokens:
            return False
        is_eos = token_id in self.request.eos_token_ids and not sampling.ignore_eos
        return is_eos or token_id in sampling.stop_token_ids

    def _take_prompt_logprobs(self) -> tuple[Logprobs | None, ...] | None:
        """The complete list, once."""
        found, self.prompt_logprobs = self.prompt_logprobs, None
        if found is None:
            return None
        assert len(found) == self.num_prompt, (
            f"{len(found)} prompt logprobs for {self.num_prompt} prompt tokens"
        )
        return tuple(found)
