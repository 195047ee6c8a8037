"""The sampler against a slow float64 oracle that sorts; and a row's token depends on that row alone."""

import numpy as np
import pytest
import torch
from scipy import stats

from moesaic.engine.sampler import Recipe, Sampler
from moesaic.errors import RequestError
from moesaic.sched.request import Request, SamplingParams

PROMPT = (1, 2, 3)
EOS = 4


def recipe(vocab: int, seed: int = 0, **sampling: object) -> Recipe:
    request = Request(
        request_id=f"r{seed}",
        prompt_ids=PROMPT,
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        seed=seed,
        eos_token_ids=(EOS,),
    )
    return Recipe.of(request, vocab)


def history(*generated: int) -> np.ndarray:
    return np.array([*PROMPT, *generated], dtype=np.int64)


def row(vocab: int, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


def oracle_probabilities(logits: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """Filtered softmax by sorting: min_p and top_k, then top_p over what is left. Ties rank by id."""
    scaled = (logits.astype(np.float64) - logits.max()) / sampling.temperature
    masses = np.exp(scaled)
    order = np.argsort(-masses, kind="stable")
    kept = np.zeros(len(logits), dtype=bool)
    kept[order[: sampling.top_k or len(logits)]] = True
    kept &= masses >= sampling.min_p
    masses = np.where(kept, masses, 0.0)
    ahead = np.cumsum(masses[order]) - masses[order]
    masses[order[ahead >= sampling.top_p * masses.sum()]] = 0.0
    return masses / masses.sum()


FILTERS = [
    {},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 0.01},
    {"top_k": 1},
    {"top_k": 7},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 0.5, "top_p": 0.8},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.7, "min_p": 0.02},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [40, 300])
def test_distribution(options, vocab):
    logits = row(vocab, seed=vocab)
    chosen = recipe(vocab, seed=42, **options)
    expected = oracle_probabilities(logits, chosen.request.sampling)
    sampler = Sampler(vocab)
    num_draws = 2500
    counts = np.zeros(vocab)
    for position in range(num_draws):
        counts[sampler.draw(logits, chosen, np.zeros(position + 1, dtype=np.int64)).token_id] += 1
    assert counts[expected == 0].sum() == 0, "a token outside the filtered set was drawn"
    rare = expected * num_draws < 5
    observed = [*counts[~rare], counts[rare].sum()]
    wanted = [*(expected[~rare] * num_draws), expected[rare].sum() * num_draws]
    observed, wanted = np.array([(o, w) for o, w in zip(observed, wanted, strict=True) if w > 0]).T
    if len(observed) > 1:
        assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-4


def test_distribution_test_can_fail():
    logits = row(40, seed=40)
    expected = oracle_probabilities(logits, SamplingParams())
    sampler, chosen = Sampler(40), recipe(40, seed=42, temperature=1.2)
    counts = np.zeros(40)
    for position in range(2500):
        counts[sampler.draw(logits, chosen, np.zeros(position + 1, dtype=np.int64)).token_id] += 1
    common = expected * 2500 >= 5
    wanted = expected[common] * counts[common].sum() / expected[common].sum()
    assert stats.chisquare(counts[common], wanted).pvalue < 1e-4


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0, "logprobs": 5}, {"top_p": 0.9, "logprobs": 3}, {"top_k": 50}, {"min_p": 0.01}],
    ids=str,
)
def test_neighbours_and_row_placement_do_not_matter(options):
    vocab = 1003
    rows = np.stack([row(vocab, seed=i) for i in range(6)])
    recipes = [recipe(vocab, seed=i, **options) for i in range(6)]
    alone = [Sampler(vocab).draw(rows[i].copy(), recipes[i], history(i)) for i in range(6)]
    shared = Sampler(vocab)
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4]):
        for i in order:
            assert shared.draw(rows[i], recipes[i], history(i)) == alone[i]


@pytest.mark.parametrize("options", [{"top_p": 0.9, "logprobs": 3}, {"top_k": 50, "min_p": 0.01}], ids=str)
def test_threads_do_not_matter(options):
    vocab = 70_001
    logits, chosen = row(vocab), recipe(vocab, seed=3, **options)
    before = torch.get_num_threads()
    found = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            sampler = Sampler(vocab)
            draws = [sampler.draw(logits, chosen, history(*range(n))) for n in range(4)]
            found.append((draws, sampler._filter(logits, logits.max(), chosen).tobytes()))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


def test_draw_depends_on_seed_and_position_only():
    vocab = 500
    logits, sampler = row(vocab), Sampler(vocab)
    first = sampler.draw(logits, recipe(vocab, seed=1), history(9, 9))
    assert first == sampler.draw(logits, recipe(vocab, seed=1), history(7, 8))
    drawn = {sampler.draw(logits, recipe(vocab, seed=s), history(9, 9)).token_id for s in range(40)}
    assert len(drawn) > 5
    drawn = {sampler.draw(logits, recipe(vocab, seed=1), history(*range(n))).token_id for n in range(40)}
    assert len(drawn) > 5


@pytest.mark.parametrize("vocab", [17, 256, 257, 5000])
def test_greedy_takes_the_lowest_of_equals(vocab):
    logits = np.zeros(vocab, dtype=np.float32)
    logits[[vocab - 1, vocab // 2 + 2, 9]] = 3.5
    assert Sampler(vocab).draw(logits, recipe(vocab, temperature=0.0), history()).token_id == 9


def test_top_k_and_top_p_ties_go_to_the_lowest_ids():
    vocab = 600
    logits = np.zeros(vocab, dtype=np.float32)
    sampler = Sampler(vocab)
    for options in ({"top_k": 3}, {"top_p": 2.5 / vocab}):
        drawn = {
            sampler.draw(logits, recipe(vocab, seed=s, **options), history()).token_id for s in range(100)
        }
        assert drawn == {0, 1, 2}


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 5e-324])
def test_tiny_temperature_is_greedy(temperature):
    vocab = 300
    logits = row(vocab)
    for seed in range(20):
        drawn = Sampler(vocab).draw(logits, recipe(vocab, seed=seed, temperature=temperature), history())
        assert drawn.token_id == logits.argmax()


def test_great_temperature_is_almost_uniform():
    vocab = 50
    logits, sampler = row(vocab), Sampler(vocab)
    drawn = [
        sampler.draw(logits, recipe(vocab, seed=s, temperature=100.0), history()).token_id
        for s in range(3000)
    ]
    assert stats.chisquare(np.bincount(drawn, minlength=vocab)).pvalue > 1e-4


def test_penalties_match_the_formulas():
    vocab = 12
    logits = np.array([1, 2, -1, 0.5, 3, 2.5, -2, 0, 1.5, 2.75, 0, 0], dtype=np.float32)
    options = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.25}
    chosen = recipe(vocab, temperature=0.0, logit_bias={9: -0.5, 7: 2.0}, **options)
    generated = (4, 4, 9, 2)
    expected = logits.astype(np.float64)
    for token_id in {*PROMPT, *generated}:
        expected[token_id] *= 1.3 if expected[token_id] <= 0 else 1 / 1.3
    for token_id in generated:
        expected[token_id] -= 0.4
    for token_id in set(generated):
        expected[token_id] -= 0.25
    expected[9] -= 0.5
    expected[7] += 2.0
    sampler = Sampler(vocab)
    edited = sampler._edit(logits, chosen, history(*generated), None)
    np.testing.assert_allclose(edited, expected, rtol=1e-6)
    assert logits[4] == 3, "the caller's row must stay as it was"
    assert sampler.draw(logits, chosen, history(*generated)).token_id == expected.argmax()


def test_presence_and_frequency_leave_the_prompt_alone():
    logits = np.zeros(8, dtype=np.float32)
    chosen = recipe(8, presence_penalty=1.0, frequency_penalty=1.0)
    edited = Sampler(8)._edit(logits, chosen, history(5), None)
    assert edited.tolist() == [0, 0, 0, 0, 0, -2, 0, 0]


def test_bias_on_every_token_changes_nothing():
    vocab = 40
    logits = row(vocab)
    banned = recipe(vocab, temperature=0.0, logit_bias=dict.fromkeys(range(vocab), -100.0))
    assert Sampler(vocab).draw(logits, banned, history()).token_id == logits.argmax()


def test_min_tokens_forbids_end_tokens_until_then():
    logits = np.zeros(10, dtype=np.float32)
    logits[EOS], logits[6] = 5, 4
    chosen = recipe(10, temperature=0.0, min_tokens=2, stop_token_ids=(6,))
    sampler = Sampler(10)
    assert sampler.draw(logits, chosen, history()).token_id == 0
    assert sampler.draw(logits, chosen, history(0)).token_id == 0
    assert sampler.draw(logits, chosen, history(0, 0)).token_id == EOS


def test_min_tokens_leaves_eos_alone_when_it_does_not_end():
    logits = np.zeros(10, dtype=np.float32)
    logits[EOS] = 5
    assert (
        Sampler(10)
        .draw(logits, recipe(10, temperature=0.0, min_tokens=2, ignore_eos=True), history())
        .token_id
        == EOS
    )


def test_grammar_mask_decides():
    logits = row(10)
    allowed = np.zeros(10, dtype=bool)
    allowed[[EOS, 7]] = True
    sampler = Sampler(10)
    for seed in range(30):
        assert sampler.draw(logits, recipe(10, seed=seed), history(), allowed).token_id in (EOS, 7)
    only_end = np.arange(10) == EOS
    assert sampler.draw(logits, recipe(10), history(), only_end).token_id == EOS


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_an_answer_fails_by_itself(value, temperature):
    logits = row(20)
    if value == -np.inf:
        logits[:] = value
    else:
        logits[13] = value
    drawn = Sampler(20).draw(logits, recipe(20, temperature=temperature), history())
    assert drawn.token_id is None
    assert drawn.failure is not None
    assert {np.nan: "NaN", np.inf: "+inf", -np.inf: "no token"}[value] in drawn.failure


def test_grammar_that_allows_nothing_is_a_failure():
    drawn = Sampler(20).draw(row(20), recipe(20), history(), np.zeros(20, dtype=bool))
    assert drawn.token_id is None
    assert "no token is allowed" in (drawn.failure or "")


@pytest.mark.parametrize("vocab", [9, 256, 1000])
def test_logprobs_match_log_softmax(vocab):
    logits = row(vocab)
    logits[3] = -np.inf
    exact = logits.astype(np.float64) - logits.max()
    exact -= np.log(np.exp(exact).sum())
    order = np.argsort(-logits, kind="stable")
    for token_id in (0, 3, 5, int(order[0])):
        found = Sampler(vocab).logprobs(logits, token_id, 4)
        assert found.logprob == pytest.approx(exact[token_id], abs=2e-6)
        assert found.rank == 1 + order.tolist().index(token_id)
        assert [i for i, _ in found.top] == order[:4].tolist()
        np.testing.assert_allclose([value for _, value in found.top], exact[order[:4]], atol=2e-6)
    assert Sampler(vocab).logprobs(logits, 3, 0).logprob == -np.inf


def test_logprobs_are_of_the_raw_row():
    logits = row(30)
    plain = Sampler(30).draw(logits, recipe(30, temperature=0.0, logprobs=2), history())
    biased = recipe(30, temperature=0.7, logprobs=2, logit_bias={plain.token_id: 50.0}, top_k=3)
    assert Sampler(30).draw(logits, biased, history()) == plain


def test_logprob_ties_rank_by_id():
    logits = np.zeros(700, dtype=np.float32)
    found = Sampler(700).logprobs(logits, 500, 3)
    assert found.rank == 501
    assert [i for i, _ in found.top] == [0, 1, 2]


@pytest.mark.parametrize("num", [0, 1, 2, 3, 20, 699, 700])
def test_best_equals_a_stable_sort(num):
    vocab = 700
    sampler = Sampler(vocab)
    for seed in range(5):
        logits = np.round(row(vocab, seed=seed))  # many ties
        sampler._shift(logits, logits.max())
        expected = np.sort(np.argsort(-logits, kind="stable")[:num])
        assert sampler._best(num).tolist() == expected.tolist()


def test_parameters_are_checked():
    with pytest.raises(RequestError, match="top_p must be above 0"):
        SamplingParams(top_p=0.0)
