from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_files import metadata_of, write_gguf
from typer.testing import CliRunner

from moesaic.cli.fit import fit_command
from moesaic.cli.main import build_app
from moesaic.errors import CheckpointError, ConfigError
from moesaic.planner.fit import fit, legal_splits
from moesaic.spec.families import read_config
from moesaic.spec.hardware import cluster
from moesaic.spec.locate import preset


def model(name: str):
    return read_config(preset(name).config, name=name)


def test_verdicts_from_roomy_to_hopeless() -> None:
    v3 = model("deepseek-v3")
    roomy = fit(v3, "deepseek-v3", cluster("h200x8"))
    tight = fit(v3, "deepseek-v3", cluster("h100x8"))
    assert (roomy.verdict, tight.verdict) == ("fits", "fits_offloaded")
    assert roomy.tokens_per_s is not None
    assert tight.tokens_per_s is not None
    assert roomy.tokens_per_s.value > tight.tokens_per_s.value
    assert roomy.tokens_per_s.low <= roomy.tokens_per_s.value <= roomy.tokens_per_s.high
    none = fit(model("llama-3.1-405b"), "llama-3.1-405b", cluster("h100"))
    assert (none.verdict, none.tokens_per_s) == ("does_not_fit", None)
    assert none.missing_bytes == none.need_bytes["device"] - none.have_bytes["device"]


def test_memory_follows_all_parameters_and_speed_the_active_ones() -> None:
    sparse, dense = (
        fit(model(name), name, cluster("h200x8")) for name in ("qwen3-235b-a22b", "llama-3.1-70b")
    )
    assert sparse.need_bytes["device"] > 3 * dense.need_bytes["device"]
    assert sparse.num_params > 3 * sparse.active_params


def test_offloading_fills_the_fastest_tier_first_and_loses_nothing() -> None:
    found = fit(model("deepseek-v3"), "deepseek-v3", cluster("rtx-4090x2"))
    assert found.verdict == "fits_offloaded"
    assert sum(found.expert_share.values()) == pytest.approx(1.0)
    assert found.need_bytes["device"] <= found.have_bytes["device"]
    one = 58 * 44.04e6 * 1.01  # an expert of every layer
    assert found.expert_share["disk"] > 0
    assert found.have_bytes["host"] - one < found.need_bytes["host"] <= found.have_bytes["host"]
    assert 0.1 < found.tokens_per_s.value < 2  # most of it comes from one drive


def test_more_memory_never_hurts() -> None:
    speeds = [
        fit(model("deepseek-v3"), "deepseek-v3", cluster(name)).tokens_per_s.value
        for name in ("h20", "h200", "b300")
    ]
    assert speeds == sorted(speeds)


def test_narrow_weights_fit_where_wide_ones_do_not() -> None:
    qwen = model("qwen3-30b-a3b")
    assert fit(qwen, "q", cluster("rtx-4090")).verdict == "fits_offloaded"
    assert fit(qwen, "q", cluster("rtx-4090"), weight_format="int4").verdict == "fits"


def test_without_a_context_a_short_model_gets_all_it_has() -> None:
    mixtral = model("mixtral-8x7b")
    assert fit(mixtral, "m", cluster("h200")).context == 4096
    short = replace(mixtral, max_position=2048)
    assert fit(short, "m", cluster("h200")).context == 2048
    (note,) = fit(short, "m", cluster("h200"), context=4096).notes
    assert note.startswith("4096 positions are beyond the model's 2048; priced as if it had them")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch": 0}, "batch and context must be at least 1, got 0 and 4096"),
        ({"context": 10**9}, "1000000000 positions are over 32 times the model's"),
        ({"kv_bits": float("nan")}, "1 to 64 bits a number, got nan"),
        ({"kv_bits": float("inf")}, "1 to 64 bits a number, got inf"),
        ({"kv_bits": 0.0}, "1 to 64 bits a number, got 0"),
        ({"weight_format": "int5"}, "unknown weight format 'int5'; did you mean int8 or int4"),
        ({"profile_name": "papper"}, "unknown profile 'papper'; did you mean paper"),
    ],
)
def test_bad_input_is_refused(change: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fit(model("qwen3-30b-a3b"), "q", cluster("h100"), **change)


def test_a_split_over_too_many_devices_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match="11 devices: neither 8 experts nor slices"):
        legal_splits(model("mixtral-8x7b"), 11)
    assert len(legal_splits(model("mixtral-8x7b"), 8).tp) == 16


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moesaic", "fit", *arguments], capture_output=True, text=True
    )


def test_the_command_line(tmp_path: Path) -> None:
    done = run("mixtral-8x7b", "--machine", "h100x2", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert found["verdict"] == "fits"
    assert set(found["tokens_per_s"]) == {"value", "low", "high"}
    assert set(found["need_bytes"]) == set(found["have_bytes"]) == {"device", "host", "disk"}
    own = tmp_path / "box.toml"
    own.write_text(
        'name = "box"\ndescription = "a box"\n'
        'memory_bytes = { value = 1e12, source = "seen" }\n'
        'memory_bytes_per_s = { value = 1e12, source = "seen" }\n'
        'flops_per_s.bfloat16 = { value = 1e14, source = "seen" }\n'
    )
    assert "on boxx1x1" in run("mixtral-8x7b", "--machine", "box", "--hardware", str(own)).stdout
    wrong = run("mixtral-8x7b", "--machine", "h10")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "did you mean h100" in wrong.stderr


def test_a_gguf_file_is_read_for_its_sizes_and_what_is_wrong_is_noted(tmp_path: Path) -> None:
    facts = {
        "block_count": 2, "context_length": 128, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "expert_count": 8, "expert_used_count": 2,
    }  # fmt: skip
    path = write_gguf(
        tmp_path / "x.gguf", metadata_of("newmoe", facts), {"token_embd.weight": ("F16", (64, 9))}
    )
    path.write_bytes(path.read_bytes()[:-1])
    done = CliRunner().invoke(build_app("fit"), ["fit", str(path), "--machine", "h200x8", "--context", "64"])
    assert done.exit_code == 0, done.output
    for words in ("verdict     fits", "cut short", "GGUF are not run yet", "counts may miss parts"):
        assert words in done.output
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match="first word are due"):
        fit_command(str(tmp_path / "empty.gguf"), "h200x8")


def test_what_this_engine_does_not_run_is_noted() -> None:
    assert fit(model("dbrx"), "dbrx", cluster("h200x8")).notes == model("dbrx").runnable_reasons != ()
    assert fit(model("mixtral-8x7b"), "mixtral", cluster("h200x8")).notes == ()
