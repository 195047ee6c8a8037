"""`moesaic generate` and `moesaic bench throughput` on a tiny checkpoint."""

import json
import os
from pathlib import Path

import checkpoints
import pytest
from typer.testing import CliRunner, Result

import moesaic
from moesaic.cli.main import build_app
from moesaic.errors import ConfigError
from moesaic.sched.request import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "tiny"
    return checkpoints.write_checkpoint(path, checkpoints.qwen3_moe_config(), has_tokenizer=True)


def invoke(verb: str, *arguments: object, text: str | None = None) -> Result:
    return CliRunner().invoke(build_app(verb), [verb, *map(str, arguments)], input=text)


def test_generate_streams_what_the_library_gives(folder):
    result = invoke("generate", folder, "--prompt", "hello", "--max-tokens", 9, "--seed", 4, "--threads", 1)
    assert result.exit_code == 0, result.output
    with moesaic.LLM(folder, num_threads=1) as llm:
        (expected,) = llm.generate("hello", SamplingParams(max_tokens=9, seed=4))
    assert result.stdout == expected.text + "\n"


def test_generate_json_has_exact_counts(folder):
    result = invoke(
        "generate", folder, "--max-tokens", 4, "--ignore-eos", "--json", "--threads", 1, text="six by"
    )
    value = json.loads(result.stdout)
    assert value["num_prompt_tokens"] == 6
    assert len(value["token_ids"]) == 4
    assert value["finish_reason"] == "length"
    assert value["numerics_digest"]
    counts = value["experts"]["prefill"]["counts"]
    assert list(counts) == ["0", "2"]
    assert all(sum(layer) == 6 * 4 for layer in counts.values())
    assert all(sum(layer) == 3 * 4 for layer in value["experts"]["decode"]["counts"].values())


def test_generate_shows_experts_in_ascii_when_piped(folder):
    result = invoke(
        "generate", folder, "--prompt", "x", "--chat", "--max-tokens", 3, "--show-experts", "--threads", 1
    )
    assert result.exit_code == 0, result.output
    picture = result.stdout.splitlines()[-3:]
    assert picture[0].startswith("which experts fired over")
    assert picture[1].startswith("layer 0 |")
    assert picture[2].startswith("layer 2 |")
    assert "\x1b" not in result.stdout


def test_an_empty_prompt_needs_a_bos(folder, tmp_path):
    result = invoke("generate", folder, "--threads", 1, text="")
    assert isinstance(result.exception, ConfigError)
    assert "the prompt is empty: give at least one token" in str(result.exception)
    result = invoke("generate", "demo", "--prompt", "", "--max-tokens", 2, "--json", "--threads", 1)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["num_prompt_tokens"] == 1


def test_a_prompt_that_is_no_utf8_is_told_in_plain_words():
    result = invoke("generate", "demo", "--prompt", os.fsdecode(b"bad \xff"))
    assert isinstance(result.exception, ConfigError)
    assert "--prompt is not UTF-8 text (byte 4)" in str(result.exception)


def test_generate_names_a_model_without_weights():
    result = invoke("generate", "deepseek-v3", "--prompt", "x")
    assert isinstance(result.exception, ConfigError)
    assert "which has no weights" in str(result.exception)


def test_bench_throughput(folder, tmp_path):
    table = tmp_path / "table.md"
    arguments = ["throughput", folder, "--num-prompts", 3, "--input-len", 6, "--output-len", 4, "--runs", 2]
    result = invoke(
        "bench",
        *arguments,
        "--threads",
        1,
        "--ignore-eos",
        "--json",
        "--markdown",
        table,
        "--slo-ttft-ms",
        "1e-3",
    )
    assert result.exit_code == 3, result.output
    value = json.loads(result.stdout)
    assert value["kind"] == "throughput"
    assert "not realistic" in value["routing"]
    assert [run["num_output_tokens"] for run in value["runs"]] == [12, 12]
    assert [run["num_cached_tokens"] for run in value["runs"]] == [0, 0]
    assert value["figures"]["output_tokens_per_s"]["median"] > 0
    assert value["numerics_digest"] == value["active"]["numerics"]["digest"]
    assert "--runs 3" in value["warnings"][0]
    assert value["slo_missed"]
    assert "| time to first token, median" in table.read_text()


def test_bench_with_prompts_says_so(folder, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("once upon a time\nthe cat sat\n")
    result = invoke(
        "bench",
        "throughput",
        folder,
        "--prompts",
        path,
        "--num-prompts",
        2,
        "--output-len",
        2,
        "--threads",
        1,
    )
    assert result.exit_code == 0, result.output
    assert "routing: prompts of prompts.txt" in result.stdout
    assert "run 3 of 3" in result.stderr


def test_bench_serve_without_a_server():
    result = invoke("bench", "serve", "--url", "http://127.0.0.1:9")
    assert isinstance(result.exception, ConfigError)
    assert "check --url" in str(result.exception)
