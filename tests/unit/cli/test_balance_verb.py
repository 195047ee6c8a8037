"""`moesaic balance` as typed: text, JSON, files, exit codes."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from moesaic.cli.main import build_app
from moesaic.errors import ConfigError

COUNTS = np.random.default_rng(0).pareto(1.0, (3, 16)) * 1000 + 50


@pytest.fixture
def load(tmp_path):
    rows = np.concatenate([np.zeros((1, 16)), np.rint(COUNTS)])
    path = tmp_path / "load.json"
    path.write_text(json.dumps({"logical_count": rows.tolist()}))
    return str(path)


@pytest.fixture
def other(tmp_path):
    rows = np.concatenate([np.zeros((1, 16)), np.rint(COUNTS[:, ::-1])])
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"logical_count": rows.tolist()}))
    return str(path)


def run(*arguments):
    result = CliRunner().invoke(build_app("balance"), ["balance", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_text_says_before_and_after(load, other):
    result = run(load, "--gpus", 4, "--slots", 20, "--holdout", other)
    assert result.exit_code == 0
    for words in (
        "load.json: SGLang logical_count, 3 sparse layers (+ 1 all zero: dense, left out)",
        "4 GPUs x 5, 16 experts, 4 redundant",
        "eplb",
        "search           *",
        "not run: robust: it needs two loads",
        "TensorRT-LLM",
        "the 3 least even layers",
        "advice",
    ):
        assert words in result.stdout
    assert "search ..." in result.stderr
    assert max(map(len, result.stdout.splitlines())) < 180


def test_json_is_alone_on_stdout(load):
    found = json.loads(run(load, "--gpus", 4, "--json").stdout)
    assert found["slots"] == 16
    assert set(found["policies"]["search"]) >= {"on_load", "holdout_mean", "move_bytes", "same_rank_replicas"}
    assert found["policies"]["search"]["holdout_mean"] is None


@pytest.mark.parametrize(
    ("target", "name"), [("moesaic", "p.json"), ("sglang", "p.json"), ("trtllm", "p.yaml")]
)
def test_written_placements_are_taken_as_current(load, other, tmp_path, target, name):
    path = tmp_path / name
    run(load, "--gpus", 4, "--slots", 20, "-o", path, "--for", target, "--policy", "search")
    found = json.loads(
        run(other, "--gpus", 4, "--current", path, "--max-moves", 6, "--policy", "search", "--json").stdout
    )
    assert found["slots"] == 20
    assert found["policies"]["search"]["num_moves"] <= 6
    again = json.loads(run(load, "--gpus", 4, "--current", path, "--policy", "search", "--json").stdout)
    assert again["policies"]["search"]["num_moves"] == 0


def test_solved_shares_are_written_where_they_can_be(load, tmp_path):
    path = tmp_path / "p.json"
    run(load, "--gpus", 4, "--slots", 20, "-o", path, "--shares", "solved", "--policy", "search")
    assert len(set(json.loads(path.read_text())["slot_share"][0])) > 2
    with pytest.raises(ConfigError, match=r"sglang .* cannot carry replica shares"):
        run(load, "--gpus", 4, "--slots", 20, "-o", path, "--shares", "solved", "--for", "sglang")


@pytest.mark.parametrize("target", ["sglang", "kt"])
def test_slices_are_written_only_by_what_carries_them(load, tmp_path, target):
    with pytest.raises(ConfigError, match=f"{target} places whole experts: it cannot carry slices"):
        run(load, "--gpus", 4, "--policy", "slices", "--for", target, "-o", tmp_path / "p.json")


def test_a_current_plan_is_read_by_what_it_holds(load, tmp_path):
    path = tmp_path / "plan.yaml"
    run(load, "--gpus", 4, "--slots", 20, "-o", path, "--for", "trtllm", "--policy", "search")
    path.rename(tmp_path / "plan.trtllm")
    path = tmp_path / "plan.trtllm"
    found = json.loads(run(load, "--gpus", 4, "--current", path, "--policy", "search", "--json").stdout)
    assert found["policies"]["search"]["num_moves"] == 0
    path.write_text("experts: none\n")
    with pytest.raises(ConfigError, match="neither JSON nor a YAML with initial_global_assignments"):
        run(load, "--gpus", 4, "--current", path)


def test_check_and_diff(load, other, tmp_path):
    assert run(load, "--check").exit_code == 3  # layers count differently
    sound = tmp_path / "sound.json"
    rows = np.random.default_rng(1).multinomial(200_000, COUNTS[0] / COUNTS[0].sum(), 3)
    sound.write_text(json.dumps(rows.tolist()))
    result = run(sound, "--check")
    assert result.exit_code == 0
    assert "sparse layers: sound" in result.stdout
    found = json.loads(run(load, sound, "--check", "--json").stdout)
    assert [one["is_sound"] for one in found] == [False, True]
    text = run("--diff", load, other, "--gpus", 4).stdout
    assert "of the choices went to other experts" in text
    assert "if the old plan stays" in text
    assert json.loads(run("--diff", load, load, "--gpus", 4, "--json").stdout)["loss"] == 0


def test_pairs_place_by_coactivation(tmp_path):
    load = tmp_path / "load.json"
    load.write_text(json.dumps({"logical_count": [[0] * 16, *np.full((3, 16), 100).tolist()]}))
    pairs = np.zeros((16, 16))
    pairs[np.arange(16), np.arange(16) ^ 2] = 100
    path = tmp_path / "pairs.json"
    path.write_text(
        json.dumps({"pairs": [{"layers": [one, one], "counts": pairs.tolist()} for one in (1, 2, 3)]})
    )
    found = json.loads(run(load, "--gpus", 4, "--nodes", 2, "--pairs", path, "--json").stdout)["policies"]
    assert found["coactivation"]["crossing_share"] < found["search"]["crossing_share"]
    path.write_text(json.dumps({"pairs": [{"layers": [0, 1], "counts": pairs.tolist()}]}))
    with pytest.raises(ConfigError, match=r"pairs\[0\].layers is \[0, 1\]; two sparse layers"):
        run(load, "--gpus", 4, "--nodes", 2, "--pairs", path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give --gpus"),
        (("--gpus", 3, "--slots", 17), "--round takes 18"),
        (("--gpus", 4, "--policy", "epbl"), "did you mean eplb"),
        (("--gpus", 4, "--for", "vllm"), "vLLM reads no placement file"),
        (("--gpus", 4, "--shares", "odd"), "unknown shares"),
        (("--gpus", 4, "--shares", "solved"), "--shares is about the placement that -o FILE writes"),
        (("--gpus", 4, "--for", "kt"), "--for is about the placement that -o FILE writes"),
        (("--gpus", 4, "--for", "kt", "-o", "x.kt"), "x.kt: a placement for kt ends in .json or .pt"),
        (("--gpus", 4, "--for", "trtllm", "-o", "x"), "ends in .yaml or .yml, this name in 'nothing'"),
        (("--gpus", 4, "--report", "x.pdf"), "x.pdf: a report ends in .html or .svg, this name in '.pdf'"),
        (("--check", "-o", "x.json"), "--check writes no file; leave -o out"),
        (("--gpus", 4, "--model", "deepseek-v3"), "16 experts, the model has 256"),
        (("--gpus", 4, "--diff", "a", "b"), "--diff names its two loads itself"),
        (("--gpus", 4, "--holdout", "absent.json"), "no such file, folder or address: 'absent.json'"),
    ],
)
def test_refusals(load, arguments, words):
    with pytest.raises(ConfigError, match=words):
        run(load, *arguments)


def test_picture(load, tmp_path):
    pytest.importorskip("matplotlib")
    run(load, "--gpus", 4, "--policy", "lpt", "--report", tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
