"""`moesaic.LLM`: prompts in, completions out, in the order asked for."""

import subprocess
import sys
from pathlib import Path

import checkpoints
import pytest
from engine_runs import random_prompt

import moesaic
from moesaic.errors import ConfigError, KernelUnavailable, RequestError
from moesaic.kernels import native
from moesaic.sched.request import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("llm") / "tiny"
    return checkpoints.write_checkpoint(path, checkpoints.olmoe_config(), has_tokenizer=True)


@pytest.fixture(scope="module")
def llm(folder):
    with moesaic.LLM(folder, num_threads=1, max_num_seqs=4, max_waiting=2) as llm:
        yield llm


def test_generate_keeps_the_order(llm):
    prompts = ["once upon a time", random_prompt(7, 1), "the cat"]
    sampling = [SamplingParams(max_tokens=i + 2, seed=i, ignore_eos=True) for i in range(3)]
    found = llm.generate(prompts, sampling, n=2)
    assert [(c.prompt_idx, c.choice_idx) for c in found] == [(i, j) for i in range(3) for j in range(2)]
    assert [len(c.token_ids) for c in found] == [2, 2, 3, 3, 4, 4]
    assert found[0].token_ids != found[1].token_ids
    (alone,) = llm.generate(prompts[2], sampling[2])
    assert alone.token_ids == found[4].token_ids
    assert alone.finish_reason == "length"
    assert alone.text == llm.tokenizer.decode(alone.token_ids)


def test_one_list_of_ids_is_one_prompt(llm):
    (found,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=1, prompt_logprobs=0, logprobs=2))
    assert found.prompt_ids == (1, 2, 3)
    assert len(found.prompt_logprobs) == 3
    assert len(found.logprobs[0].top) == 2


def test_more_prompts_than_the_queue_holds(llm):
    found = llm.generate([[i] for i in range(15)], SamplingParams(max_tokens=2, seed=1, ignore_eos=True))
    assert [c.prompt_ids for c in found] == [(i,) for i in range(15)]
    assert all(len(c.token_ids) == 2 for c in found)


def test_stop_strings_cut_the_text_and_free_the_request(llm):
    (free,) = llm.generate("abc", SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    stop = free.text[6:8]
    cut = free.text.index(stop)
    (found,) = llm.generate(
        "abc", SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, stop=(stop,))
    )
    assert found.text == free.text[:cut]
    assert (found.finish_reason, found.stop_token_id) == ("stop", None)
    assert len(found.token_ids) < 30
    shown = SamplingParams(
        temperature=0.0, max_tokens=400, ignore_eos=True, stop=(stop,), has_stop_in_output=True
    )
    (found,) = llm.generate("abc", shown)
    assert found.text == free.text[: cut + len(stop)]


def test_stop_tokens_stay_out_of_the_text(llm):
    letter = ord("x")
    sampling = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={letter: 100.0})
    (free,) = llm.generate("abc", sampling)
    assert free.text == free.text[0] * 5
    token_id = free.token_ids[0]
    stopping = SamplingParams(
        temperature=0.0, max_tokens=5, logit_bias={letter: 100.0}, stop_token_ids=(token_id,)
    )
    (found,) = llm.generate("abc", stopping)
    assert (found.text, found.finish_reason, found.stop_token_id) == ("", "stop", token_id)


def test_stream_gives_the_text_of_generate(llm):
    sampling = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    pieces = list(llm.stream("the dog", sampling))
    (whole,) = llm.generate("the dog", sampling)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert pieces[-1].completion.token_ids == whole.token_ids
    assert all(piece.completion is None for piece in pieces[:-1])


def test_leaving_a_stream_cancels_it(llm):
    stream = llm.stream("the dog", SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True))
    next(stream)
    stream.close()
    llm.generate([1], SamplingParams(max_tokens=1))
    assert llm.engine.snapshot().num_running == 0


def test_mistakes_are_named(llm, folder):
    with pytest.raises(ConfigError, match="3 prompts need as many SamplingParams"):
        llm.generate(["a", "b", "c"], [SamplingParams(), SamplingParams()])
    with pytest.raises(ConfigError, match="n must be at least 1"):
        llm.generate("a", n=0)
    with pytest.raises(RequestError, match="token id 999"):
        llm.generate([[1], [999]])
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
        moesaic.LLM(folder, max_num_seq=3)


def test_the_models_defaults_apply_where_nothing_is_stated(tmp_path):
    path = checkpoints.write_checkpoint(tmp_path / "m", checkpoints.llama_config())
    (path / "generation_config.json").write_text('{"temperature": 0.0, "max_new_tokens": 3, "top_k": 0}')
    with moesaic.LLM(path, num_threads=1) as llm:
        assert llm.defaults.params() == SamplingParams(temperature=0.0, max_tokens=3)
        (found,) = llm.generate([1, 2])
        (stated,) = llm.generate([1, 2], SamplingParams(temperature=0.0, max_tokens=3))
        assert found.token_ids == stated.token_ids
    with pytest.raises(ConfigError, match="was closed: make a new one"):
        llm.generate([1, 2])


@pytest.mark.parametrize("level", ["reference", *native.levels()])
def test_the_level_asked_for_is_the_one_that_runs(tmp_path, monkeypatch, level):
    path = checkpoints.write_checkpoint(tmp_path / "m", checkpoints.llama_config())
    monkeypatch.setenv("MOESAIC_CPU_LEVEL", level)
    with moesaic.LLM(path, num_threads=1) as llm:
        expected = level if level == "reference" else f"native/{level}"
        assert llm.engine.snapshot().active["backend"] == expected


def test_a_level_of_another_processor_is_refused(tmp_path, monkeypatch):
    path = checkpoints.write_checkpoint(tmp_path / "m", checkpoints.llama_config())
    other = "neon" if "neon" not in native.levels() else "avx2"
    monkeypatch.setenv("MOESAIC_CPU_LEVEL", other)
    with pytest.raises(KernelUnavailable, match=other):
        moesaic.LLM(path, num_threads=1)


def test_without_a_tokenizer_only_ids_work(tmp_path):
    path = checkpoints.write_checkpoint(tmp_path / "m", checkpoints.llama_config())
    with moesaic.LLM(path, num_threads=1) as llm:
        (found,) = llm.generate([[1, 2]], SamplingParams(max_tokens=2, temperature=0.0))
        assert (len(found.token_ids), found.text) == (2, "")
        with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
            llm.generate("text")
        with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
            llm.generate([[1]], SamplingParams(stop=("x",)))


def test_a_script_that_forgets_to_close_ends(folder):
    script = (
        "import sys, moesaic\n"
        f"llm = moesaic.LLM({str(folder)!r}, num_threads=1)\n"
        "stream = llm.stream('abc', moesaic.SamplingParams(ignore_eos=True))\n"
        "next(stream)\n"
        "print('left')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "left\n"
    assert done.stderr == ""


def test_a_wrong_type_is_named(llm):
    with pytest.raises(RequestError, match=r"a text or a list of token ids, got 3\.5"):
        llm.generate([3.5])
    with pytest.raises(ConfigError, match=r"must be SamplingParams, got \{'temperature'"):
        llm.generate([[1, 2]], {"temperature": 0})


def test_rounded_weights_are_named_in_what_is_active(folder):
    with moesaic.LLM(folder, num_threads=1, format="int4-g32") as rounded:
        active = rounded.engine.snapshot().active
        (found,) = rounded.generate([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(found.token_ids) == 3
    assert active["effects"] == {"weights=int4-g32": "lossy"}
    assert "weights=int4-g32: lossy" in active["not_active"]
    assert active["numerics"]["weight_format"] == "int4-g32"
    assert active["numerics"]["activation_format"] == "int8-g32"
    with pytest.raises(ConfigError, match=r"format 'int4-g33' is unknown; did you mean int4-g32"):
        moesaic.LLM(folder, format="int4-g33")
