"""Whole engines over tiny models: what requests may ask for, and what they get."""

import json

import numpy as np
import pytest
from checkpoints import EOS_ID
from engine_runs import (
    Inbox,
    fresh_model,
    make_engine,
    make_request,
    random_prompt,
    run,
    run_alone,
    tiny_model,
)


@pytest.fixture(scope="module")
def engine():
    engine = make_engine(tiny_model("qwen3_moe"))
    yield engine
    engine.close()


def test_prompt_logprobs_are_the_decode_logprobs(engine):
    prompt = random_prompt(21, 1)
    drawn = run(engine, [make_request("a", prompt, seed=3, max_tokens=12, logprobs=4)])["a"]
    whole = make_request("b", prompt + drawn.tokens, max_tokens=0, prompt_logprobs=4)
    scored = run(engine, [whole])["b"]
    assert scored.tokens == []
    assert scored.finish_reason == "length"
    assert scored.prompt_logprobs is not None
    assert len(scored.prompt_logprobs) == 21 + len(drawn.tokens)
    assert scored.prompt_logprobs[0] is None
    assert list(scored.prompt_logprobs[21:]) == drawn.logprobs


def test_seeds_decide(engine):
    prompt = random_prompt(6, 2)

    def draw(seed: int) -> list[int]:
        return run(engine, [make_request("a", prompt, seed=seed, max_tokens=10)])["a"].tokens

    assert draw(1) == draw(1)
    assert len({tuple(draw(seed)) for seed in range(4)}) == 4


def test_stop_ids_and_eos(engine):
    prompt = random_prompt(8, 3)
    free = run(engine, [make_request("a", prompt, temperature=0.0, max_tokens=12, ignore_eos=True)])["a"]
    stop = free.tokens[4]
    first = free.tokens.index(stop)
    stopped = run(
        engine,
        [make_request("a", prompt, temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,))],
    )["a"]
    assert stopped.tokens == free.tokens[: first + 1]
    assert stopped.finish_reason == "stop"
    wanted = {"logit_bias": {EOS_ID: 50.0}, "temperature": 0.0, "max_tokens": 6}
    assert run(engine, [make_request("a", prompt, **wanted)])["a"].tokens == [EOS_ID]
    late = run(engine, [make_request("a", prompt, min_tokens=3, **wanted)])["a"]
    assert len(late.tokens) == 4
    assert late.tokens[-1] == EOS_ID
    ignored = run(engine, [make_request("a", prompt, ignore_eos=True, **wanted)])["a"]
    assert ignored.tokens == [EOS_ID] * 6
    assert ignored.finish_reason == "length"


def test_huge_max_tokens_end_at_the_context():
    engine = make_engine(tiny_model("llama"), max_model_len=40)
    try:
        answers = run(
            engine,
            [
                make_request("explicit", random_prompt(30, 1), max_tokens=10**9, ignore_eos=True),
                make_request("open", random_prompt(30, 1), ignore_eos=True),
            ],
        )
    finally:
        engine.close()
    assert {len(answer.tokens) for answer in answers.values()} == {10}
    assert {answer.finish_reason for answer in answers.values()} == {"length"}


def test_cancelling_midway_frees_the_pool(engine):
    inbox = Inbox()
    engine.submit(make_request("long", random_prompt(20, 4), ignore_eos=True), inbox.take)
    inbox.wait("long", num_tokens=3)
    assert engine.snapshot().kv_blocks_used > 0
    engine.cancel("long")
    answer = inbox.wait("long")
    assert answer.finish_reason == "cancelled"
    assert len(answer.tokens) < 400
    for _ in range(200):
        if engine.snapshot().kv_blocks_used == 0:
            break
        run(engine, [make_request("tick", [1], max_tokens=1)])
    assert engine.snapshot().kv_blocks_used == 0


def test_many_requests_in_a_pool_for_three():
    model = tiny_model("llama")
    requests = [
        make_request(f"r{i}", random_prompt(5 + i % 12, i % 7), seed=i, max_tokens=2, logprobs=0)
        for i in range(200)
    ]
    picked = requests[::40]
    expected = run_alone(model, picked)
    engine = make_engine(model, num_blocks=6, max_num_seqs=16, max_tokens_per_step=48, has_prefix_cache=False)
    try:
        answers = run(engine, requests)
        assert all(answer.finish_reason in ("length", "stop") for answer in answers.values())
        assert engine.snapshot().kv_blocks_used == 0
    finally:
        engine.close()
    for request in picked:
        assert answers[request.request_id].bits == expected[request.request_id].bits


def test_expert_counts_are_exact():
    model = tiny_model("olmoe")
    engine = make_engine(model, trace_routes=True, max_tokens_per_step=8, max_num_seqs=4)
    requests = [
        make_request(f"r{i}", random_prompt(10 + i, i), seed=i, max_tokens=5, ignore_eos=True)
        for i in range(3)
    ]
    try:
        answers = run(engine, requests)
        loads = {load.phase: load for load in engine.expert_load(None)}
        recent = engine.expert_load(3600.0)
    finally:
        engine.close()
    num_computed = sum(len(request.prompt_ids) + 4 for request in requests)
    assert loads["prefill"].num_tokens == 33
    assert loads["decode"].num_tokens == 12
    routes = np.concatenate([np.concatenate(answer.routes) for answer in answers.values()])
    assert routes.shape == (num_computed, 2, 3)
    for moe_idx in range(2):
        total = loads["prefill"].counts[moe_idx] + loads["decode"].counts[moe_idx]
        assert total.sum() == num_computed * 3
        assert total.tolist() == np.bincount(routes[:, moe_idx].ravel(), minlength=8).tolist()
    assert sum(load.num_tokens for load in recent) == num_computed


def test_a_poisoned_request_fails_alone():
    model = fresh_model("qwen3_moe")
    clean = [
        make_request(f"r{i}", random_prompt(9 + i, i), seed=i, max_tokens=6, logprobs=1) for i in range(3)
    ]
    expected = run_alone(model, clean)
    model.decoder.embedding_VD[5] = float("nan")
    bad = [
        make_request("bad", [5, 1, 2], max_tokens=5),
        make_request("scored", [1, 5, 2], max_tokens=0, prompt_logprobs=1),
    ]
    engine = make_engine(model, num_blocks=12)
    try:
        answers = run(engine, [bad[0], *clean, bad[1]])
        again = run(engine, clean)  # in the blocks that held NaN
    finally:
        engine.close()
    assert 5 not in {token for request in clean for token in request.prompt_ids}
    for request in clean:
        assert answers[request.request_id].bits == expected[request.request_id].bits
        assert again[request.request_id].bits == expected[request.request_id].bits
    assert answers["bad"].finish_reason == answers["scored"].finish_reason == "error"
    assert "NaN" in (answers["bad"].error or "")
    assert "not finite" in (answers["scored"].error or "")


class Brackets:
    """A grammar of one word: three tokens from a set, then the end. Counts how often it is compiled."""

    def __init__(self) -> None:
        self.num_compiled = 0

    def check(self, schema: str) -> None:
        json.loads(schema)

    def compile(self, schema: str) -> "BracketMatcher":
        self.num_compiled += 1
        return BracketMatcher(json.loads(schema))


class BracketMatcher:
    def __init__(self, words: list[list[int]]) -> None:
        self._words = words
        self._at = 0

    def mask(self) -> np.ndarray:
        allowed = np.zeros(288, dtype=bool)
        allowed[self._words[self._at] if self._at < len(self._words) else [EOS_ID]] = True
        return allowed

    def advance(self, token_id: int) -> None:
        assert token_id in self._words[self._at], "the matcher was not replayed"
        self._at += 1


def test_grammar_survives_preemption():
    model = tiny_model("llama")
    words = [[1, 2, 3], [4, 5], [6, 7, 8], [9, 10], [11, 12]] * 6
    grammars = Brackets()
    requests = [
        make_request(f"r{i}", random_prompt(12, i), seed=i, grammar=json.dumps(words), logprobs=1)
        for i in range(4)
    ]
    roomy = make_engine(model, grammars=grammars)
    tight = make_engine(model, grammars=grammars, num_blocks=5, max_num_seqs=4, max_tokens_per_step=16)
    try:
        expected, found = run(roomy, requests), run(tight, requests)
        assert tight.snapshot().preemptions_total > 0
    finally:
        roomy.close()
        tight.close()
    for request in requests:
        answer = found[request.request_id]
        assert answer.finish_reason == "stop"
        assert all(token in word for token, word in zip(answer.tokens, [*words, [EOS_ID]], strict=True))
        assert answer.bits == expected[request.request_id].bits
    assert grammars.num_compiled == 8, "recompiled though nothing was rewound"
