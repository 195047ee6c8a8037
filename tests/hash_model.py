"""A fake model that runs step plans over a paged cache of hashes: any wrong block, window or state shows.

The cached value of a position hashes its token with every value visible to it, read back from the pool
through the plan's block table, as attention does. A request's history is known only by what plans wrote.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from moesaic.errors import PeerLost
from moesaic.sched.key import KvKeyScope
from moesaic.sched.ledger import CacheGroup, KvLedger
from moesaic.sched.request import FinishReason, Logprobs, Request, RequestEvent, SamplingParams
from moesaic.sched.scheduler import Limits, Scheduler
from moesaic.sched.step import RowPlan, StepPlan, StepResult

VOCAB = 40
SCOPE = KvKeyScope(model_digest="m", numerics_digest="n", tokenizer_digest="t", positions="rope")


def tokens_group() -> CacheGroup:
    return CacheGroup(kind="tokens", window=None, layer_idxs=(0,), block_bytes=64, sequence_bytes=0)


def window_group(window: int) -> CacheGroup:
    return CacheGroup(kind="window", window=window, layer_idxs=(1,), block_bytes=32, sequence_bytes=0)


def state_group() -> CacheGroup:
    return CacheGroup(kind="state", window=None, layer_idxs=(2,), block_bytes=0, sequence_bytes=100)


def make_request(
    request_id: str,
    prompt_ids: Sequence[int],
    *,
    priority: int = 0,
    salt: str = "",
    eos: int = 0,
    **sampling: object,
) -> Request:
    return Request(
        request_id=request_id,
        prompt_ids=tuple(prompt_ids),
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        seed=0,
        eos_token_ids=(eos,),
        priority=priority,
        salt=salt,
    )


def make_scheduler(
    groups: Sequence[CacheGroup],
    num_blocks: Sequence[int],
    *,
    kv_block: int = 4,
    max_num_seqs: int = 8,
    max_tokens_per_step: int = 16,
    max_model_len: int = 64,
    max_waiting: int = 1000,
    num_replicas: int = 1,
    max_in_flight: int = 1,
    has_prefix_cache: bool = True,
) -> Scheduler:
    ledger = KvLedger(groups, num_blocks, kv_block=kv_block, scope=SCOPE, has_prefix_cache=has_prefix_cache)
    limits = Limits(
        max_num_seqs=max_num_seqs,
        max_tokens_per_step=max_tokens_per_step,
        max_model_len=max_model_len,
        max_waiting=max_waiting,
    )
    return Scheduler(ledger, limits, num_replicas=num_replicas, max_in_flight=max_in_flight)


def _value(group: CacheGroup, token_id: int, earlier: Sequence[int]) -> int:
    """What a position caches, given the values of all positions before it (a state sees only the last)."""
    if group.kind == "state":
        return hash((token_id, *earlier[-1:]))
    visible = earlier if group.window is None else earlier[max(0, len(earlier) - group.window + 1) :]
    return hash((token_id, *visible))


def _token(values: Sequence[int]) -> int:
    return hash(tuple(values)) % VOCAB


def run_alone(
    groups: Sequence[CacheGroup], request: Request, limit: int
) -> tuple[tuple[int, ...], FinishReason]:
    """The tokens and the reason that any schedule must give; `limit` is prompt and output together."""
    values: list[list[int]] = [[] for _ in groups]
    tokens = list(request.prompt_ids)
    sampling = request.sampling
    out: list[int] = []
    for position in range(limit):
        if position >= len(tokens):
            token = _token([v[-1] for v in values])
            tokens.append(token)
            out.append(token)
            is_stop = (
                token in request.eos_token_ids and not sampling.ignore_eos
            ) or token in sampling.stop_token_ids
            if is_stop and len(out) > sampling.min_tokens:
                return tuple(out), "stop"
        for group, cached in zip(groups, values, strict=True):
            cached.append(_value(group, tokens[position], cached))
    return tuple(out), "length"


class HashModel:
    """Ranks with one pool per replica; `run` executes a plan as often as asked."""

    def __init__(self, groups: Sequence[CacheGroup], kv_block: int, num_replicas: int = 1) -> None:
        self.groups = tuple(groups)
        self.kv_block = kv_block
        self.known: dict[str, Request] = {}
        # replica, group -> (block or slot, offset) -> (position, value)
        self.pools: list[list[dict[tuple[int, int], tuple[int, int]]]] = [
            [{} for _ in groups] for _ in range(num_replicas)
        ]

    def run(self, plan: StepPlan, *, failing: Collection[str] = (), is_lost: bool = False) -> StepResult:
        for request_id in plan.retired:
            self.known.pop(request_id, None)
        for request in plan.admitted:
            self.known[request.request_id] = request
        tokens: dict[str, tuple[int, ...]] = {}
        logprobs: dict[str, tuple[Logprobs, ...]] = {}
        prompt_logprobs: dict[str, tuple[Logprobs | None, ...]] = {}
        for replica_idx, batch in enumerate(plan.batches):
            for row in batch.rows:
                sampled = self._run_row(row, replica_idx, is_poison=is_lost or row.request_id in failing)
                request = self.known[row.request_id]
                if row.is_sampled:
                    tokens[row.request_id] = (sampled,)
                    logprobs[row.request_id] = (Logprobs(token_id=sampled, logprob=-1.0, rank=1),)
                if request.sampling.prompt_logprobs is not None:
                    prompt_logprobs[row.request_id] = self._prompt_logprobs(row, request)
        lost = PeerLost(rank=1, layer_idx=0, stage="collect", seconds=1.0) if is_lost else None
        return StepResult(
            step_id=plan.step_id,
            tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            loads=(),
            spread={},
            lost=lost,
            failed=dict.fromkeys(failing, "non-finite logits"),
        )

    def _run_row(self, row: RowPlan, replica_idx: int, *, is_poison: bool) -> int:
        last: list[int] = []
        for i, group in enumerate(self.groups):
            pool = self.pools[replica_idx][i]
            if group.kind == "state":
                value = self._run_state(row, pool)
                assert row.state_to is not None
                pool[row.state_to, 0] = (
                    row.start_idx + row.num_tokens,
                    hash("poison") if is_poison else value,
                )
                last.append(value)
                continue
            blocks = row.blocks[i]
            assert len(blocks) == -(-(row.start_idx + row.num_tokens) // self.kv_block)
            for position, token_id in enumerate(row.token_ids, row.start_idx):
                first = 0 if group.window is None else max(0, position - group.window + 1)
                earlier = [0] * first + [self._read(pool, blocks, p) for p in range(first, position)]
                value = hash(("poison", position)) if is_poison else _value(group, token_id, earlier)
                block_id, offset = blocks[position // self.kv_block], position % self.kv_block
                assert block_id >= 0, "a token is written to a block that was freed"
                pool[block_id, offset] = (position, value)
            last.append(value)
        return _token(last)

    def _run_state(self, row: RowPlan, pool: dict[tuple[int, int], tuple[int, int]]) -> int:
        earlier: list[int] = []
        assert row.state_to != row.state_from
        if row.state_from is not None:
            position, value = pool[row.state_from, 0]
            assert position == row.start_idx, "the state read is not that of the tokens before"
            earlier = [value]
        else:
            assert row.start_idx == 0
        group = next(g for g in self.groups if g.kind == "state")
        for token_id in row.token_ids:
            earlier.append(_value(group, token_id, earlier))
        return earlier[-1]

    def _read(
        self, pool: dict[tuple[int, int], tuple[int, int]], blocks: Sequence[int], position: int
    ) -> int:
        found, value = pool[blocks[position // self.kv_block], position % self.kv_block]
        assert found == position, f"the place of position {position} holds position {found}"
        return value

    def _prompt_logprobs(self, row: RowPlan, request: Request) -> tuple[Logprobs | None, ...]:
        """The logits of position p tell of the prompt's token p + 1."""
        first: tuple[None, ...] = (None,) if row.start_idx == 0 else ()
        last = min(row.start_idx + row.num_tokens, len(request.prompt_ids) - 1)
        return first + tuple(
            Logprobs(token_id=request.prompt_ids[p], logprob=-float(p), rank=1)
            for p in range(row.start_idx + 1, last + 1)
        )


class Owner:
    """Collects the events of requests and checks that each ends exactly once."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, RequestEvent] = {}
        self.events: dict[str, list[RequestEvent]] = {}

    def take(self, events: Sequence[RequestEvent]) -> None:
        for event in events:
            assert event.request_id not in self.ends, f"{event.request_id} got an event after its end"
            self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
            self.events.setdefault(event.request_id, []).append(event)
            if event.finish_reason is not None:
                self.ends[event.request_id] = event


def drain(scheduler: Scheduler, model: HashModel, owner: Owner, max_steps: int = 5000) -> list[StepPlan]:
    """Run until nothing is left; the plans in order."""
    plans: list[StepPlan] = []
    for _ in range(max_steps):
        plan = scheduler.schedule(float(len(plans)))
        if plan is None:
            break
        plans.append(plan)
        owner.take(scheduler.commit(model.run(plan), len(plans) + 0.5))
        for replica in scheduler.replicas:
            replica.ledger.check()
    assert not scheduler.has_work, "work is left and nothing is planned"
    return plans
