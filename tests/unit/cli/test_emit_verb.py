import json

import pytest
from deployments import deployment, instance, model, with_places_of_its_own, with_uneven_shares
from typer.testing import CliRunner

from moesaic.cli.main import build_app
from moesaic.errors import ConfigError
from moesaic.spec.deployment import single_process
from moesaic.spec.experts import contiguous_plan
from moesaic.spec.numerics import preset as numerics

V3 = model("deepseek-v3")
FP8 = "weights=fp8 kv=bfloat16 dispatch=fp8"


def run(*arguments):
    return CliRunner().invoke(build_app("emit"), ["emit", *arguments])


@pytest.fixture
def wide(tmp_path):
    path = tmp_path / "deployment.json"
    path.write_text(deployment(V3, instance(V3, dp=16, ep=16), formats=FP8).to_json())
    return str(path)


@pytest.fixture
def helix(tmp_path):
    path = tmp_path / "helix.json"
    path.write_text(deployment(V3, instance(V3, tp=2, kvp=4, ep=8), formats=FP8).to_json())
    return str(path)


def test_the_model_is_found_by_its_digest(wide):
    shown = run(wide, "--for", "vllm")
    assert shown.exit_code == 0, shown.output
    assert "# deepseek-ai/DeepSeek-V3 on vLLM 0.33.0" in shown.output
    assert (
        "vllm serve deepseek-ai/DeepSeek-V3 --tensor-parallel-size 1 --data-parallel-size 16" in shown.output
    )
    assert "# serve, node 1 of 2" in shown.output
    named = run(wide, "--for", "sglang", "--model", "/mnt/weights/v3", "--version", "0.5.9")
    assert "--model-path /mnt/weights/v3" in named.output
    assert "SGLang 0.5.9" in named.output


def test_what_cannot_be_carried_is_refused_and_partial_goes_on(helix):
    refused = run(helix, "--for", "vllm", "--model", "m")
    assert isinstance(refused.exception, ConfigError)
    for part in ("kvp = 4", "has no Helix", "nearest: decode context parallel 4", "--partial"):
        assert part in str(refused.exception)
    shown = run(helix, "--for", "vllm", "--model", "m", "--partial")
    assert shown.exit_code == 0
    assert "# left out: instances[0].layout.attention.kvp = 4" in shown.output
    assert "--tensor-parallel-size 8 --decode-context-parallel-size 4" in shown.output


def test_lines_and_files_are_written(helix, wide, tmp_path):
    folder = tmp_path / "out"
    assert run(helix, "--for", "trtllm", "--model", "m", "-o", str(folder)).exit_code == 0
    assert {path.name for path in folder.iterdir()} == {"serve.sh", "serve.options.yaml"}
    assert (folder / "serve.sh").read_text().startswith("#!/bin/sh\ntrtllm-serve m")
    run(wide, "--for", "vllm", "--model", "m", "-o", str(folder), "--kubernetes", "--image", "own/image:1")
    assert {"serve-node0.sh", "serve-node1.sh", "manifest.yaml"} <= {path.name for path in folder.iterdir()}
    assert 'image: "own/image:1"' in (folder / "manifest.yaml").read_text()


def test_places_of_its_own_become_the_engines_file(tmp_path):
    path, out = tmp_path / "placed.json", tmp_path / "out"
    placed = with_places_of_its_own(instance(V3, dp=16, ep=16, redundant=16))
    path.write_text(deployment(V3, placed, formats=FP8).to_json())
    shown = run(str(path), "--for", "sglang", "-o", str(out))
    assert shown.exit_code == 0
    assert max(map(len, shown.output.splitlines())) < 1200  # not the whole map on the screen
    rows = json.loads((out / "serve.experts.json").read_text())["physical_to_logical_map"]
    assert len(rows) == 61
    assert rows[3] == placed.plan.slot_expert[0].tolist()  # layers 0 to 2 are dense
    assert run(str(path), "--for", "trtllm", "-o", str(out)).exit_code == 0
    assert f"  3: {rows[3]}" in (out / "serve.balancer.yaml").read_text()
    nameless = run(str(path), "--for", "sglang", "--model", "m")
    assert nameless.exit_code == 0, nameless.output  # the digest says which preset it is


def test_shares_are_refused_and_partial_writes_no_file(tmp_path):
    path, out = tmp_path / "shared.json", tmp_path / "out"
    shared = with_uneven_shares(instance(V3, dp=16, ep=16, redundant=16))
    path.write_text(deployment(V3, shared, formats=FP8).to_json())
    refused = run(str(path), "--for", "sglang")
    assert "plan.slot_share = uneven" in str(refused.exception)
    shown = run(str(path), "--for", "sglang", "--partial", "-o", str(out))
    assert shown.exit_code == 0, shown.output
    assert not (out / "serve.experts.json").exists()


def test_a_release_that_nobody_read_is_named(wide):
    shown = run(wide, "--for", "vllm", "--version", "9.9")
    assert "# note: the flags of 9.9 are not known; these lines are checked against 0.33.0" in shown.output
    assert "are not known" not in run(wide, "--for", "vllm", "--version", "v0.33.0").output


def test_json_has_the_promised_keys(wide):
    found = json.loads(run(wide, "--for", "vllm", "--model", "m", "--json").output)
    assert set(found) == {
        "engine", "version", "basis", "model", "launches", "files", "lacks", "notes",
    }  # fmt: skip
    assert set(found["launches"][0]) == {
        "instance", "node", "num_nodes", "count", "env", "words", "text",
    }  # fmt: skip


def test_moesaic_itself(tmp_path, wide):
    refused = run(wide, "--for", "moesaic", "--model", "m")
    assert "numerics.backend = external" in str(refused.exception)
    shown = run(wide, "--for", "moesaic", "--model", "m", "--partial", "--kubernetes", "--version", "9.9")
    assert shown.output.splitlines()[-1] == "moesaic serve m"
    for part in ("left out: numerics.backend = external", "moesaic has no manifest", "9.9 are not known"):
        assert part in shown.output
    path = tmp_path / "one.json"
    one = single_process("digest", numerics("portable", dtype="bfloat16"), contiguous_plan((4,), 1))
    path.write_text(one.to_json())
    shown = run(str(path), "--for", "moesaic", "--model", "/mnt/m")
    assert shown.output.splitlines()[-1] == f"moesaic serve /mnt/m --deployment {path}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--for", "vlm"], "did you mean vllm"),
        (["--for", "vllm", "--version", "newest"], "is no version of vllm"),
        (["--for", "vllm", "--model", "mixtral-8x7b"], "is another model than the deployment was made for"),
        (["--for", "kt", "--kubernetes"], "has no manifest"),
    ],
)
def test_bad_input_is_named(wide, arguments, message):
    refused = run(wide, *arguments)
    assert isinstance(refused.exception, ConfigError)
    assert message in str(refused.exception)


def test_a_refusal_of_the_manifest_comes_after_what_cannot_be_carried(wide):
    message = str(run(wide, "--for", "kt", "--kubernetes").exception)
    assert "instances[0].layout.ep = 16" in message.partition("has no manifest")[0]


def test_a_file_that_is_far_too_long_is_refused_unread(tmp_path, monkeypatch):
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(2**40)
    monkeypatch.setattr("moesaic.cli.emit.MAX_BYTES", 2**20)
    assert "that a deployment may have" in str(run(str(path), "--for", "vllm").exception)


def test_output_is_a_folder(wide, tmp_path):
    refused = run(wide, "--for", "vllm", "-o", str(tmp_path / "x.sh"))
    assert "written to a folder" in str(refused.exception)
    assert not (tmp_path / "x.sh").exists()


def test_files_that_are_no_deployment_are_named(tmp_path):
    assert "moesaic plan -o writes one" in str(run(str(tmp_path / "no.json"), "--for", "vllm").exception)
    path = tmp_path / "bad.json"
    path.write_text("{}")
    assert "model_digest is missing" in str(run(str(path), "--for", "vllm").exception)
    one = single_process("digest", numerics("portable", dtype="bfloat16"), contiguous_plan((4,), 1))
    path.write_text(one.to_json())
    assert "no preset is the model" in str(run(str(path), "--for", "vllm").exception)
