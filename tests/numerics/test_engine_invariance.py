"""A request's tokens and log probabilities are the same bits however the engine computes it.

Alone is the reference; then among neighbours, in chunks, after a prefix hit, and preempted by a small pool.
Float32 first: bfloat16 rounds many differences away.
"""

import pytest
from engine_runs import make_engine, make_request, random_prompt, run, run_alone, tiny_model

from moesaic.models.build import LoadedModel
from moesaic.sched.request import Request

CASES = [
    ("qwen3_moe", "float32"),
    ("qwen3_moe", "bfloat16"),
    ("deepseek_v3", "float32"),
    ("mixtral", "float32"),
    ("olmoe", "bfloat16"),
    ("gpt_oss", "float32"),
    ("phimoe", "bfloat16"),
    pytest.param(("qwen2_moe", "float32"), marks=pytest.mark.long),
    pytest.param(("granitemoe", "bfloat16"), marks=pytest.mark.long),
    ("qwen3_next", "float32"),
    pytest.param(("qwen3_5_moe", "bfloat16"), marks=pytest.mark.long, id="qwen3_5_moe-bfloat16"),
]


def make_requests() -> list[Request]:
    """Greedy and drawn, filtered and penalised, short and long, with and without log probabilities."""
    shared = random_prompt(37, seed=100)
    return [
        make_request("greedy", random_prompt(5, 1), temperature=0.0, max_tokens=8, logprobs=3),
        make_request("drawn", random_prompt(23, 2), seed=5, max_tokens=8, logprobs=0),
        make_request("filtered", shared, seed=6, top_p=0.8, top_k=40, min_p=0.01, max_tokens=8, logprobs=2),
        make_request(
            "penalised",
            shared + random_prompt(9, 3),
            seed=7,
            repetition_penalty=1.3,
            frequency_penalty=0.5,
            presence_penalty=0.2,
            logit_bias={7: 2.0, 9: -3.0},
            min_tokens=4,
            max_tokens=8,
            logprobs=1,
        ),
        make_request(
            "scored", random_prompt(33, 4), temperature=0.0, max_tokens=4, prompt_logprobs=2, logprobs=2
        ),
        make_request("one", [3], seed=8, max_tokens=8, logprobs=0),
    ]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request):
    model = tiny_model(*request.param)
    return model, run_alone(model, make_requests())


def check(model: LoadedModel, expected, **options):
    """Run all requests at once under `options`, compare bits, and return the engine's last snapshot."""
    engine = make_engine(model, **options)
    try:
        answers = run(engine, make_requests())
        for request_id, answer in answers.items():
            assert answer.error is None
            assert answer.bits == expected[request_id].bits, request_id
        return engine.snapshot()
    finally:
        engine.close()


def test_among_neighbours(case):
    check(*case)


def test_in_chunks(case):
    snapshot = check(*case, max_num_seqs=6, max_tokens_per_step=7)
    assert snapshot.steps_total > 20, "the prompts were not chunked"


def test_after_preemption(case):
    model, _ = case
    requests = [
        make_request(f"r{i}", random_prompt(15, i), seed=i, max_tokens=20, top_p=0.95, logprobs=1)
        for i in range(3)
    ]
    expected = run_alone(model, requests)
    engine = make_engine(model, num_blocks=5)
    try:
        answers = run(engine, requests)
        assert engine.snapshot().preemptions_total > 0, "the pool was large enough for all"
    finally:
        engine.close()
    for request_id, answer in answers.items():
        assert answer.bits == expected[request_id].bits, request_id


def test_after_a_prefix_hit(case):
    model, expected = case
    engine = make_engine(model)
    try:
        run(engine, make_requests())
        again = run(engine, make_requests())
    finally:
        engine.close()
    for request_id, answer in again.items():
        assert answer.bits == expected[request_id].bits, request_id
    if any(layer.mixer.caches("float32")[0].kind == "state" for layer in model.spec.layers):
        assert all(answer.num_cached == 0 for answer in again.values()), "a state cannot be cut at a block"
        return
    cached = {request_id: answer.num_cached for request_id, answer in again.items()}
    assert cached["filtered"] == 32
    assert cached["penalised"] == 32
    assert cached["scored"] == 0, "log probabilities of a prompt need it computed"


def test_the_comparison_can_fail(case):
    model, expected = case
    other = run_alone(model, [make_request("drawn", random_prompt(23, 2), seed=6, max_tokens=8, logprobs=0)])
    assert other["drawn"].bits != expected["drawn"].bits
