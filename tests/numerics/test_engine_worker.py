"""A plan can be run twice: same result, same state; and phases, histories and requests are kept apart."""

import numpy as np
import pytest
import torch
from engine_runs import make_request, random_prompt, tiny_model

from moesaic.engine.batch import Census, MicroBatch
from moesaic.engine.runner import Runner
from moesaic.engine.worker import Worker
from moesaic.experts.contract import Routing
from moesaic.kv.pool import KvPool
from moesaic.sched.key import KvKeyScope
from moesaic.sched.ledger import KvLedger, cache_groups
from moesaic.sched.scheduler import Limits, Scheduler
from moesaic.sched.step import RowPlan, StepResult

SCOPE = KvKeyScope(model_digest="m", numerics_digest="n", tokenizer_digest="t", positions="p")


def parts(model):
    kv_block = model.numerics.kv_block
    groups = cache_groups(model.spec, model.numerics.kv_format, kv_block)
    num_blocks = (16,) * len(groups)
    ledger = KvLedger(groups, num_blocks, kv_block=kv_block, scope=SCOPE)
    limits = Limits(max_num_seqs=4, max_tokens_per_step=8, max_model_len=100, max_waiting=10)
    pool = KvPool(model.spec, model.numerics, num_blocks)
    return Scheduler(ledger, limits), Worker(Runner(model.decoder, pool), model.spec, traces_routes=True)


def content(result: StepResult):
    loads = [(load.phase, [c.tolist() for c in load.counts], load.num_tokens) for load in result.loads]
    routes = {request_id: routes.tolist() for request_id, routes in result.routes.items()}
    return (
        result.step_id,
        result.tokens,
        result.logprobs,
        result.prompt_logprobs,
        loads,
        routes,
        result.failed,
    )


@pytest.mark.parametrize(("family", "num_times"), [("qwen3_moe", 1), ("qwen3_moe", 3), ("qwen3_next", 2)])
def test_running_a_plan_again_changes_nothing(family, num_times):
    model = tiny_model(family)
    once, twice = parts(model), parts(model)
    requests = [
        make_request("a", random_prompt(11, 1), seed=1, max_tokens=6, repetition_penalty=1.4, logprobs=1),
        make_request(
            "b", random_prompt(4, 2), seed=2, max_tokens=6, frequency_penalty=1.0, prompt_logprobs=1
        ),
    ]
    for scheduler, _ in (once, twice):
        for request in requests:
            scheduler.add(request, 0.0)
    while (plan := once[0].schedule(0.0)) is not None:
        result = once[1].run(plan)
        again = twice[0].schedule(0.0)
        for _ in range(num_times):
            repeated = twice[1].run(again)
            assert content(repeated) == content(result)
        once[0].commit(result, 1.0)
        twice[0].commit(repeated, 1.0)
    once[1].forget(once[0].take_retired())
    assert once[1].num_tracked == 0


def rows(*spans: tuple[int, int]) -> list[RowPlan]:
    return [
        RowPlan(
            request_id=f"r{i}",
            start_idx=start,
            num_tokens=num,
            is_sampled=False,
            token_ids=tuple(range(num)),
            blocks=(),
            state_from=None,
            state_to=None,
        )
        for i, (start, num) in enumerate(spans)
    ]


def test_phases_are_told_apart():
    batch = MicroBatch.of(rows((0, 3), (5, 1), (4, 1), (6, 2)), prompt_lengths=[3, 5, 5, 4])
    assert batch.offsets == (0, 3, 4, 5)
    assert batch.is_decode_T.tolist() == [False, False, False, True, False, False, False]
    assert batch.row_span(3) == slice(5, 7)
    assert batch.token_ids.tolist() == [0, 1, 2, 0, 0, 0, 1]


def test_no_rows_are_an_idle_step():
    batch = MicroBatch.of([], [])
    assert (len(batch.token_ids), batch.offsets) == (0, ())
    census = Census([4], keeps_routes=False)
    census.observer(batch)
    assert census.counts == {}


def test_routes_of_layers_with_fewer_choices_are_padded():
    batch = MicroBatch.of(rows((0, 2)), [2])
    observer = Census([4, 4], keeps_routes=True).observer(batch)
    for experts in ([[0, 2], [1, 3]], [[3], [0]]):
        experts_TK = torch.tensor(experts)
        observer(
            0 if len(experts[0]) == 2 else 1, Routing(experts_TK=experts_TK, weights_TK=experts_TK.float())
        )
    found = observer.routes()
    assert found is not None
    assert found.tolist() == [[[0, 2], [3, -1]], [[1, 3], [0, -1]]]


def test_a_retired_request_is_forgotten_before_a_new_one_of_its_name():
    model = tiny_model("llama")
    scheduler, worker = parts(model)
    for seed in (1, 2):
        scheduler.add(make_request("same", random_prompt(5, seed), seed=seed, max_tokens=2), 0.0)
        while (plan := scheduler.schedule(0.0)) is not None:
            scheduler.commit(worker.run(plan), 1.0)
    assert np.array_equal(worker._tracks["same"].history[:5], random_prompt(5, 2))
