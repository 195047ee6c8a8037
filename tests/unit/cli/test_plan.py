import builtins
import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from moesaic.cli.main import build_app
from moesaic.errors import CapacityError, ConfigError
from moesaic.spec.deployment import from_json

SMALL = ["plan", "olmoe-1b-7b", "--machine", "h100x2", "--isl", "512", "--osl", "128"]


def run(*arguments):
    return CliRunner().invoke(build_app("plan"), list(arguments))


def test_one_screen_says_what_why_and_what_else():
    shown = run(*SMALL, "--tpot-ms", "20")
    assert shown.exit_code == 0, shown.output
    for part in (
        "answer",
        "TPOT",
        "TTFT",
        "bottleneck",
        "runner-up",
        "memory",
        "EP or not?",
        "ruled out",
        "searched",
    ):
        assert part in shown.output
    assert "per price unit (L20 = 1)" in shown.output
    assert len(shown.output.splitlines()) <= 40


def test_json_has_the_promised_keys(tmp_path):
    path = tmp_path / "deployment.json"
    found = json.loads(run(*SMALL, "--json", "-o", str(path)).output)
    assert set(found) >= {"search_s", "candidates", "ruled_out", "best", "runner_up", "ep_verdict"}
    for plan in (found["best"], found["runner_up"]):
        assert set(plan) >= {
            "pools", "tokens_per_s_per_gpu", "tokens_per_s_per_price", "tpot_s", "ttft_s", "bottleneck",
        }  # fmt: skip
        assert set(plan["tpot_s"]) == set(plan["ttft_s"]) == {"value", "low", "high"}
        assert plan["tpot_s"]["low"] < plan["tpot_s"]["value"] < plan["tpot_s"]["high"]
        for pool in plan["pools"]:
            assert set(pool) >= {"role", "machine", "num_gpus", "layout", "batch", "memory_bytes_per_rank"}
            assert set(pool["layout"]) == {
                "tp", "dp", "ep", "pp", "kvp", "expert_tp", "num_micro_batches", "num_redundant",
                "num_offloaded",
            }  # fmt: skip
    for miss in found["ruled_out"].values():
        assert set(miss) == {"count", "nearest"}
    for band in found["ep_verdict"]:
        assert set(band) == {"concurrency_from", "concurrency_to", "use_ep", "gain", "reason"}
    assert from_json(path.read_text()).predicted.tpot_s.low == found["best"]["tpot_s"]["low"]


def test_without_prices_there_is_none(tmp_path):
    source = 'source = "made up"'
    (tmp_path / "toy.toml").write_text(
        f'name = "toy"\ndescription = "a test"\nmemory_bytes = {{ value = 80e9, {source} }}\n'
        f"memory_bytes_per_s = {{ value = 2e12, {source} }}\n[flops_per_s]\nbfloat16 = "
        f"{{ value = 3e14, {source} }}\n"
    )
    toy = ["plan", "olmoe-1b-7b", "--machine", "toy", "--hardware", str(tmp_path / "toy.toml")]
    assert json.loads(run(*toy, "--json").output)["best"]["tokens_per_s_per_price"] is None
    assert json.loads(run(*toy, "--json", "--price", "2").output)["best"]["tokens_per_s_per_price"] > 0
    refused = run(*toy, "--objective", "per-price")
    assert isinstance(refused.exception, ConfigError)
    assert "give --price toy=NUMBER" in str(refused.exception)


def test_a_missed_objective_is_exit_3_with_the_best_and_what_it_takes():
    shown = run(*SMALL, "--tpot-ms", "0.01")
    assert shown.exit_code == 3
    assert "no layout meets --tpot-ms; the nearest needs --tpot-ms" in shown.output
    found = run(*SMALL, "--tpot-ms", "0.01", "--json")
    assert found.exit_code == 3
    assert json.loads(found.output)["missed"] == ["tpot"]


def test_what_does_not_fit_names_the_tiers_that_would_hold_it():
    found = run("plan", "qwen3-30b-a3b", "--machine", "rtx4090", "--concurrency", "1")
    assert found.exit_code == 0
    assert "on the devices, 92 in host memory" in found.stdout
    refused = run("plan", "llama-3.1-405b", "--machine", "rtx-4090")
    assert isinstance(refused.exception, CapacityError)
    assert "experts in host memory or on disk do not help" in str(refused.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--machine", "h101x8"], "unknown machine 'h101'; did you mean h100"),
        (["--machine", "h100x8", "--objective", "cheap"], "unknown objective 'cheap'"),
        (["--machine", "h100x8", "--load", "/nowhere.json"], "no such file"),
        (["--machine", "h100x8", "--skew", "-1"], "a skew is an exponent of at least 0"),
        (["--machine", "h100x8", "--skew", "1", "--load", "x"], "give one of them"),
        (["--machine", "h100x8", "--profile", "ideal"], "unknown profile 'ideal'"),
        (["--machine", "h100x8", "--layout", "tp=3"], "16 attention heads / tp 3 = 5.33"),
        (["--machine", "h100x8", "-o", "/nowhere/d.json"], "cannot be written"),
        (["--machine", "h100x8", "--report", "plan.pdf"], "--report plan.pdf: a report is .html, a page, or"),
        (["--machine", "h100x8", "--osl", "100000000"], "over 32 times the model's 4096"),
    ],
)
def test_bad_input_is_named(arguments, message):
    refused = run("plan", "olmoe-1b-7b", *arguments)
    assert isinstance(refused.exception, ConfigError)
    assert message in str(refused.exception)


def test_report_is_one_page_with_every_plot(tmp_path):
    path = tmp_path / "plan.html"
    assert run(*SMALL, "--isl", "20000", "--report", str(path)).exit_code == 0
    text = path.read_text()
    assert text.count("<svg") >= 5
    heads = (
        "Throughput and speed",
        "Time of a token",
        "Memory of the fullest",
        "Load of each",
        "If bandwidth",
    )
    for head in heads:
        assert head in text
    for name in ("frontier", "in one node", "prefill apart", "the answer", "runner-up"):
        assert f">{name}</text>" in text
    assert "http://" not in text.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )


def test_help_loads_no_planner():
    code = (
        "import sys\nfrom moesaic.cli.main import build_app\n"
        "for verb in ('plan', 'fit', 'accuracy'):\n    build_app(verb)\n"
        "assert not {'numpy', 'moesaic.spec.model', 'moesaic.planner.search'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_token_out_is_said_to_have_no_time_per_token():
    asked = [*SMALL, "--osl", "1", "--tpot-ms", "0.01"]
    shown = run(*asked)
    assert shown.exit_code == 0
    assert "TPOT -, TTFT" in shown.output
    found = json.loads(run(*asked, "--json").output)
    assert found["best"]["tpot_s"] is None
    assert any("no time per token" in note for note in found["notes"])


def test_one_device_has_one_verdict_on_expert_parallelism():
    (verdict,) = json.loads(run("plan", "qwen3-30b-a3b", "--machine", "h200", "--json").output)["ep_verdict"]
    assert (verdict["use_ep"], verdict["gain"], verdict["reason"]) == (False, None, "one device")
    assert "requests: no EP; one device" in run("plan", "qwen3-30b-a3b", "--machine", "h200").output


def test_report_without_matplotlib_fails_before_the_search(monkeypatch, tmp_path):
    import sys

    monkeypatch.delitem(sys.modules, "moesaic.planner.charts", raising=False)
    real = builtins.__import__

    def without(name, *rest, **more):
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    refused = run(*SMALL, "--report", str(tmp_path / "plan.html"))
    assert isinstance(refused.exception, ModuleNotFoundError)
    assert refused.exception.name == "matplotlib"
