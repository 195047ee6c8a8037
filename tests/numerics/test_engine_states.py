"""Engines whose models keep running states: what they say of prefixes, and slots that others left behind."""

from __future__ import annotations

import pytest
from engine_runs import Inbox, make_engine, make_request, random_prompt, run, run_alone, tiny_model

from moesaic.errors import CapacityError


def test_no_prefix_is_reused_and_it_is_said() -> None:
    model = tiny_model("qwen3_next")
    engine = make_engine(model)
    try:
        request = make_request("a", random_prompt(40, 1), max_tokens=2)
        first, again = (run(engine, [request])["a"] for _ in range(2))
        active = engine.snapshot().active
    finally:
        engine.close()
    assert first.bits == again.bits
    assert (first.num_cached, again.num_cached) == (0, 0)
    note = "prefix cache: off, because this model keeps a running state that cannot be cut at a block"
    assert note in active["not_active"]
    assert active["kv"]["num_blocks"][0] == 2 * active["limits"]["max_num_seqs"]


def test_slots_count_against_the_pool() -> None:
    model = tiny_model("qwen3_next")
    engine = make_engine(model, kv_bytes=2_000_000, max_num_seqs=4)
    try:
        active = engine.snapshot().active
    finally:
        engine.close()
    sizes = [group.unit_bytes for group in engine.config.groups]
    used = sum(size * count for size, count in zip(sizes, active["kv"]["num_blocks"], strict=True))
    assert active["kv"]["num_blocks"][0] == 8
    assert 0 <= 2_000_000 - used < sizes[1]
    with pytest.raises(CapacityError, match="beside the states and windows of 32"):
        make_engine(model, kv_bytes=32 * 2 * sizes[0])


def test_slots_left_by_cancelled_and_poisoned_requests_change_nothing() -> None:
    model = tiny_model("qwen3_next")
    clean = [
        make_request(f"r{i}", random_prompt(9 + 14 * i, i), seed=i, max_tokens=6, logprobs=1)
        for i in range(3)
    ]
    expected = run_alone(model, clean)
    engine = make_engine(model, max_num_seqs=3, max_tokens_per_step=8)
    pool = engine._link._worker._runner._pool
    for layer_idx in pool.groups[0].layer_idxs:
        for tensor in pool._tensors[layer_idx]:
            tensor.fill_(float("nan"))  # as a request whose numbers ran away would leave it
    try:
        inbox = Inbox()
        for name, length in (("chunked", 200), ("decoding", 5)):
            engine.submit(make_request(name, random_prompt(length, 7), ignore_eos=True), inbox.take)
        inbox.wait("decoding", num_tokens=2)
        for name in ("chunked", "decoding"):
            engine.cancel(name)
            assert inbox.wait(name).finish_reason == "cancelled"
        answers = run(engine, clean)
        assert engine.snapshot().kv_blocks_used == 0
    finally:
        engine.close()
    for request_id, answer in answers.items():
        assert answer.bits == expected[request_id].bits, request_id
