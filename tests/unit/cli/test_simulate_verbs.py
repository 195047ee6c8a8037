"""`moesaic simulate pingpong, ep, capacity, serve, fleet`: screens, JSON, pictures, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from moesaic.cli.main import build_app
from moesaic.errors import ConfigError, MoesaicError

TRACE = [
    {"timestamp": 1000 * i, "input_length": 700 + i, "output_length": 4, "hash_ids": [0, i % 3]}
    for i in range(6)
]
PINGPONG = ("pingpong", "--attention-ms", "1", "--expert-ms", "1", "--transfer-ms", "0.5", "--layers", "2")
EP = ("ep", "--experts", "16", "--top-k", "2", "--gpus", "4", "--tokens", "1,8", "--trials", "3")
CAPACITY = ("capacity", "--tokens", "4096", "--burst-s", "2", "--experts", "8", "--top-k", "2")
SERVE = ("serve", "olmoe-1b-7b", "--machine", "h200")
FLEET = ("fleet", "olmoe-1b-7b", "--machine", "h200", "--engines", "2")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(build_app("simulate"), ["simulate", *arguments])


DRIFT = ("drift", "--experts", "16", "--top-k", "2", "--gpus", "4", "--redundant", "4", "--drift-s", "0")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, TRACE)))
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "first", "last"),
    [
        (PINGPONG, "given times: attention 1 ms", "8 ms"),
        (EP, "16 experts, top-2, over 4 GPUs in 1 nodes", "= 66.7%"),
        (DRIFT, "16 experts, top-2, 4 copies over 4 GPUs", "9"),
        (CAPACITY, "8 experts, top-2, 4096 tokens a step", "32 s"),
        (
            (*SERVE, "--requests", "8", "--rate", "9"),
            "olmoe-1b-7b on h200x1x1, tp=1",
            "calibrated).",
        ),
        ((*FLEET, "--requests", "12", "--rate", "9"), "2 x olmoe-1b-7b on h200x1x1", "calibrated)."),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_each_verb_is_one_screen(arguments: tuple[str, ...], first: str, last: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith(first)
    assert lines[-1].endswith(last)
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 110
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (PINGPONG, {"attention_s", "expert_s", "transfer_s", "num_layers", "fewest", "paper_fewest", "rows",
                    "chosen"}),
        (EP, {"routing", "chunks", "messages"}),
        (
            (*FLEET, "--requests", "5"),
            {"num_engines", "num_requests", "num_cut", "num_too_long", "staleness_s", "kv_tokens", "rows",
             "has_prefix_cache", "best_hit_rate"},
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_json_is_the_report(arguments: tuple[str, ...], keys: set[str]) -> None:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    assert set(json.loads(done.stdout)) == keys


def test_serve_replays_a_trace_and_says_what_it_left_out(trace: str) -> None:
    done = run(*SERVE, "--trace", trace, "--max-model-len", "704", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["num_requests"], found["num_finished"]) == (6, 4)
    assert (found["num_cut"], found["num_too_long"]) == (3, 2)
    assert found["prefix_hit"] == pytest.approx(3 * 512 / (700 + 701 + 702 + 703), rel=0.4)
    assert set(found["ttft_s"]) == {"mean", "p", "most"}
    text = run(*SERVE, "--trace", trace, "--max-model-len", "704").stdout
    assert "2 left out: longer than the context of 704 or the pool; 3 answers cut to the context" in text


def test_stress_and_speed_are_about_the_traces_own_rate(trace: str) -> None:
    stressed = run(*SERVE, "--trace", trace, "--stress", "1.5")
    assert "0.15 a second: 1.5 x the busiest minute" in stressed.stdout
    fast, slow = (
        json.loads(run(*SERVE, "--trace", trace, "--speed", speed, "--json").stdout) for speed in ("5", "1")
    )
    assert slow["duration_s"] > 4 * fast["duration_s"]
    closed = run(*SERVE, "--trace", trace, "--concurrency", "1")
    assert ", 1 at a time" in closed.stdout


def test_a_missed_objective_is_exit_3_and_a_met_one_is_0() -> None:
    missed = run(*SERVE, "--requests", "4", "--ttft-ms", "0.001")
    assert missed.exit_code == 3
    assert "missed        TTFT: P99 is" in missed.stdout
    assert run(*SERVE, "--requests", "4", "--ttft-ms", "100000").exit_code == 0
    assert run(*FLEET, "--requests", "4", "--tpot-ms", "0.0001").exit_code == 3


def test_a_deployment_file_brings_its_own_layout(tmp_path: Path) -> None:
    path = tmp_path / "deployment.json"
    planned = CliRunner().invoke(
        build_app("plan"),
        ["plan", "olmoe-1b-7b", "--machine", "h200x1x2", "--layout", "tp=2", "-o", str(path)],
    )
    assert planned.exit_code == 0, planned.output
    done = run("serve", "olmoe-1b-7b", "--deployment", str(path), "--requests", "3")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("olmoe-1b-7b on h200x1x2, tp=2")
    other = run("serve", "qwen3-30b-a3b", "--deployment", str(path))
    assert "the deployment is of another model" in str(other.exception)


def test_a_picture_is_an_svg(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.svg"
    assert run(*PINGPONG, "--svg", str(path)).exit_code == 0
    assert path.read_text().startswith("<svg")


def test_a_recorded_load_routes_and_a_machine_prices_the_exchange(tmp_path: Path) -> None:
    load = tmp_path / "load.json"
    counts = [[1 + (e + layer) % 64 for e in range(64)] for layer in range(16)]
    load.write_text(json.dumps({"logical_count": counts}))
    machine = ("--machine", "h200x8", "--tokens", "32", "--trials", "2")
    done = run("ep", "olmoe-1b-7b", "--load", str(load), *machine)
    assert done.exit_code == 0, done.output
    assert "load.json, sparse layer" in done.stdout
    assert "<- best" in done.stdout
    assert "one per GPU" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 110


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pingpong",), "needs times: --attention-ms"),
        (("pingpong", "mixtral-8x22b"), "--machine is missing"),
        (("pingpong", "mixtral-8x22b", "--machine", "a800x8", "--expert-ms", "1"), "not both"),
        (("pingpong", "llama-3-70b", "--machine", "h800x8"), "a dense model has no experts"),
        (("pingpong", "mixtral-8x22b", "--machine", "a800x8", "--tp", "0"), "--tp must be at least 1"),
        ((*PINGPONG[:-2], "--layers", "0", "--micro-batches", "0"), "must be at least 1"),
        (("ep", "--gpus", "24"), "nearest legal: 16 and 32 GPUs"),
        (("ep", "--gpus", "0"), "gpus must be at least 1, got 0"),
        (("ep", "--topics", "1000000"), "1,000,000 topics of 256 experts are more than"),
        ((*PINGPONG[:-2], "--layers", "0"), "must be at least 1"),
        (("capacity", "--tokens", "100000000"), "give fewer --tokens or a smaller --burst"),
        (("drift", "--experts", "60000", "--redundant", "0"), "tokens x seconds x experts"),
        (("ep", "--tokens", "x"), "--tokens must be whole numbers"),
        (("ep", "--skew", "nan"), "a skew is an exponent"),
        (("ep", "--topics", "0"), "topics must be at least 1"),
        (("ep", "--machine", "h200x8", "--gpus", "8"), "give one"),
        (("ep", "--load", "x.json"), "--load needs the MODEL"),
        (("ep", "--layer", "3"), "--layer is one of a recorded load"),
        (("ep", "llama-3-70b"), "dense"),
        (("ep", "deepseek-v3", "--experts", "8"), "--experts 8 is not the model's 256"),
        ((*DRIFT, "--redundant", "3"), "4 copies do"),
        ((*DRIFT, "--topics", "1"), "two topics or more"),
        ((*DRIFT, "--add-above", "0.5"), "drop_below"),
        (("capacity", "--burst", "0.5"), "a burst is at least 1"),
        (("capacity", "--static", "0.1"), "--static must be factors"),
        (("capacity", "--start", "9"), "the factor starts at 9"),
        (SERVE[:2], "--machine is missing"),
        ((*SERVE, "--rate", "0"), "--rate must be a finite number above 0"),
        ((*SERVE, "--rate", "1", "--stress", "1.5"), "give one of them"),
        ((*SERVE, "--stress", "1.5"), "give --trace FILE"),
        ((*SERVE, "--requests", "0"), "requests must be at least 1"),
        ((*SERVE, "--concurrency", "0"), "concurrency must be at least 1"),
        ((*SERVE, "--concurrency", "2", "--rate", "1"), "closed loop"),
        ((*SERVE, "--trace", "none.jsonl"), "cannot be read"),
        ((*SERVE, "--layout", "tp=3"), "no layout over 1 devices has tp=3"),
        ((*SERVE, "--layout", "pp=2"), "pp is not simulated"),
        ((*SERVE, "--max-model-len", "999999"), "beyond the model's 4096 positions"),
        ((*SERVE, "--ttft-ms", "0"), "--ttft-ms must be a finite number above 0"),
        ((*SERVE, "--max-num-seqs", "0"), "max_num_seqs must be at least 1"),
        ((*SERVE, "--kv-bytes", "1MB"), "KV pool of 1000000 B is too small"),
        (("serve", "deepseek-v3", "--machine", "h200"), "needs? .* GB"),
        ((*SERVE, "--deployment", "x.json"), "give one or the other"),
        ((*FLEET[:-1], "0"), "engines must be 1 to 1024"),
        ((*FLEET, "--staleness-s", "-1"), "staleness must be"),
        ((*FLEET, "--prefix-blocks", "0"), "--prefix-blocks must be at least 1"),
        ((*FLEET, "--hit-weight", "-1"), "at least 0"),
        (
            ("fleet", "olmoe-1b-7b", "--machine", "h200x2", "--layout", "dp=2"),
            "dp=1, which a fleet's engine needs",
        ),
        ((*PINGPONG, "--svg", "x.png"), "the picture is an SVG"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert isinstance(done.exception, MoesaicError), done.output
    assert done.exception.exit_code == 2
    assert done.stdout == ""
    with pytest.raises(type(done.exception), match=message):
        raise done.exception


def test_unsorted_traces_are_refused_and_sorted_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, reversed(TRACE))))
    refused = run(*SERVE, "--trace", str(path))
    assert isinstance(refused.exception, ConfigError)
    assert "line 2" in str(refused.exception)
    assert run(*SERVE, "--trace", str(path), "--sort").exit_code == 0


def test_progress_is_on_stderr_and_only_for_long_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from moesaic.cli import progress

    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_PLAIN_S", 0.0)
    done = run(*SERVE, "--requests", "3", "--json")
    assert json.loads(done.stdout)["num_finished"] == 3
    assert "3 of 3 requests" in done.stderr
