"""`moesaic verify` agrees with transformers on what is right, and names the first layer of what is not.

Both sides run in this process here, but for one run of the whole command.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CONFIGS, random_tensors, write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from moesaic.audit import child, matrix, probe, prompts, verify
from moesaic.audit.child import ChildFailed, ChildKilled, Job, run_child
from moesaic.audit.verify import Verification, dump_json
from moesaic.cli.verify import render
from moesaic.engine.config import EngineConfig
from moesaic.errors import ConfigError, MoesaicError, UnsupportedModelError
from moesaic.kernels.ops import backends
from moesaic.models.build import load
from moesaic.spec.families import read_config
from moesaic.spec.locate import locate

STABLE_KEYS = (
    "ok", "max_abs_logit_diff", "first_differing_layer", "greedy_agreement", "batch_invariant",
    "negative_control_caught", "unconsumed", "unfilled", "known_unused",
)  # fmt: skip


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each side as a function call: a child costs seconds of imports."""

    def run(module: str, name: str, job: Job, show: object) -> dict[str, Any]:
        from moesaic.audit import oracle

        work = probe.probe if name == "engine" else oracle.consult
        try:
            result = dict(work(job, lambda phase: None))
        except MoesaicError as error:
            result = {"error": str(error), "is_unsupported": isinstance(error, UnsupportedModelError)}
        return json.loads(json.dumps(result | {"peak_rss_bytes": 2, "peak_own_bytes": 1}))

    monkeypatch.setattr(verify, "run_child", run)
    monkeypatch.setattr(prompts, "RANDOM_LENGTHS", (5, 40, 90))  # past every window of the test configs


@pytest.fixture
def without_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the comparison alone."""
    monkeypatch.setattr(probe, "run_matrix", lambda *_: [])
    monkeypatch.setattr(probe, "negative_control", lambda *_: True)


def run_verify(folder: Path, reference: Path | None = None, **options: Any) -> Verification:
    other = None if reference is None else locate(str(reference))
    options = {"num_threads": 1, "num_tokens": 2} | options
    wished = {
        name: options.pop(name) for name in ("dtype", "format", "num_threads", "backend") if name in options
    }
    wishes = EngineConfig(model=str(folder), **wished)
    return verify.verify(locate(str(folder)), wishes, reference=other, **options)


# Of each make one: scalars after layers, scaled embeddings, biases and sinks, other places of layers, states.
LONG = ("gemma4", "granitemoe", "gpt_oss", "llama4", "qwen3_next")


@pytest.mark.parametrize(
    "family",
    ["olmoe", "deepseek_v3", "phimoe", *(pytest.param(family, marks=pytest.mark.long) for family in LONG)],
)
@pytest.mark.usefixtures("without_matrix")
def test_families_agree_in_both_dtypes(tmp_path: Path, family: str) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS[family](), dtype=torch.bfloat16)
    found = run_verify(folder)
    assert found.failures == ()
    assert [one.dtype for one in found.passes] == ["float32", "bfloat16"]
    exact, own = found.passes
    assert exact.max_abs_logit_diff is not None
    assert exact.max_abs_logit_diff < 1e-4
    assert max(stage.median for stage in exact.stages) < 1e-5
    assert exact.greedy_agreement == 1.0
    assert len(own.stages) == CONFIGS[family]()["num_hidden_layers"] + 2
    assert all(stage.oracle_median is not None for stage in own.stages)


@pytest.mark.usefixtures("without_matrix")
def test_longrope_is_told_to_take_its_long_factors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["phimoe"]())
    found = run_verify(folder)
    assert found.failures == ()
    assert any("told to take the long factors at every length" in note for note in found.notes)
    monkeypatch.setattr("moesaic.audit.oracle.take_long_factors", lambda model: None)
    other = run_verify(folder, dtype="float32")
    assert other.first_differing_layer == 0, "by itself transformers turns otherwise"


@pytest.mark.usefixtures("without_matrix")
def test_a_heavy_checkpoint_gets_less_work_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "find_spec", lambda name: None)
    monkeypatch.setattr(verify, "HEAVY_BYTES", 1000)
    monkeypatch.setattr(prompts, "HEAVY_PROMPT", 20)
    folder = write_checkpoint(tmp_path, CONFIGS["llama"](rope_scaling=None))
    found = run_verify(folder, num_tokens=None)
    assert (found.num_tokens, found.num_prompt_tokens) == (8, 5 + 20 + 20)
    assert any("prompts are cut to 20 tokens" in note for note in found.notes)
    assert any("8 greedy tokens rather than 32: --tokens asks for more" in note for note in found.notes)
    assert run_verify(folder, num_tokens=3).num_tokens == 3


def change_tensor(folder: Path, other: Path, name: str) -> Path:
    """A copy in which one tensor is another."""
    tensors = dict(load_file(folder / "model.safetensors"))
    tensors[name] = tensors[name].flip(0) if tensors[name].dim() > 1 else 1.5 * tensors[name]
    other.mkdir()
    (other / "config.json").write_text((folder / "config.json").read_text())
    save_file({key: value.contiguous() for key, value in tensors.items()}, other / "model.safetensors")
    return other


@pytest.mark.parametrize(
    ("name", "layer", "dtype"),
    [
        ("model.layers.1.mlp.experts.3.down_proj.weight", 1, torch.float32),
        ("model.layers.1.mlp.experts.3.down_proj.weight", 1, torch.bfloat16),
        ("model.layers.2.self_attn.k_norm.weight", 2, torch.bfloat16),
        ("model.embed_tokens.weight", None, torch.float32),
        ("lm_head.weight", None, torch.float32),
    ],
)
@pytest.mark.usefixtures("without_matrix")
def test_one_changed_tensor_is_found_in_its_layer(
    tmp_path: Path, name: str, layer: int | None, dtype: torch.dtype
) -> None:
    config = CONFIGS["qwen3_moe"](mlp_only_layers=[])
    folder = write_checkpoint(tmp_path / "right", config, dtype=dtype)
    found = run_verify(folder, change_tensor(folder, tmp_path / "wrong", name), dtype=str(dtype)[6:])
    assert not found.to_json()["ok"]
    assert found.first_differing_layer == layer
    places = {"model.embed_tokens.weight": "embedding", "lm_head.weight": "head"}
    assert found.passes[0].first_difference == places.get(name, f"layer {layer}")


@pytest.mark.parametrize(
    ("family", "changes", "layer"),
    [
        ("olmoe", {"norm_topk_prob": True}, 0),
        ("qwen3_moe", {"norm_topk_prob": False}, 0),
        ("deepseek_v3", {"routed_scaling_factor": 1.0}, 1),
        ("mixtral", {"sliding_window": None}, 0),
        ("llama", {"rope_theta": 2000.0}, 0),
    ],
)
@pytest.mark.usefixtures("without_matrix")
def test_a_flipped_flag_is_found(tmp_path: Path, family: str, changes: Mapping[str, Any], layer: int) -> None:
    folder = write_checkpoint(tmp_path / "right", CONFIGS[family]())
    other = write_checkpoint(tmp_path / "wrong", CONFIGS[family](**changes))
    found = run_verify(folder, other)
    assert found.first_differing_layer == layer
    assert any(f"layer {layer} differs from transformers" in failure for failure in found.failures)


def test_whole_report(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["olmoe"](), has_tokenizer=True)
    found = run_verify(folder)
    data = json.loads(dump_json(found))
    assert tuple(data)[: len(STABLE_KEYS)] == STABLE_KEYS
    assert data["ok"]
    assert data["batch_invariant"]
    assert data["negative_control_caught"]
    cells = {cell["name"]: cell["is_equal"] for cell in data["passes"][0]["matrix"]}
    assert cells == dict.fromkeys(("neighbours", "permuted", "chunked", "prefix_hit", "preempted"), True)
    text = render(found)
    assert "same bits as alone: neighbours yes" in text
    assert "every check passed" in text


@pytest.mark.usefixtures("without_matrix")
def test_without_transformers_the_rest_is_still_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "find_spec", lambda name: None)
    found = run_verify(write_checkpoint(tmp_path, CONFIGS["llama"]()))
    data = found.to_json()
    assert [data[key] for key in ("max_abs_logit_diff", "first_differing_layer", "greedy_agreement")] == [
        None
    ] * 3
    assert data["ok"]
    assert data["negative_control_caught"]
    assert "pip install 'transformers" in render(found)


@pytest.mark.usefixtures("without_matrix")
def test_a_model_that_transformers_lacks_is_no_failure_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = verify.run_child

    def run(module: str, name: str, job: Job, show: Any) -> dict[str, Any]:
        if name == "oracle":
            return {"error": "transformers 5 knows no model_type 'olmoe'", "is_unsupported": True}
        return right(module, name, job, show)

    monkeypatch.setattr(verify, "run_child", run)
    found = run_verify(write_checkpoint(tmp_path, CONFIGS["olmoe"]()))
    assert found.to_json()["ok"]
    assert "knows no model_type 'olmoe'" in (found.oracle_missing or "")


@pytest.mark.usefixtures("without_matrix")
def test_a_comparison_that_breaks_is_an_error_and_no_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stops transformers on a model that it knows: damaged files, a fault of its own."""
    right = verify.run_child

    def run(module: str, name: str, job: Job, show: Any) -> dict[str, Any]:
        if name == "oracle":
            raise ChildFailed("the oracle process ended with status 1: SafetensorError: incomplete metadata")
        return right(module, name, job, show)

    monkeypatch.setattr(verify, "run_child", run)
    folder = write_checkpoint(tmp_path, CONFIGS["olmoe"]())
    with pytest.raises(
        MoesaicError, match=r"could not run .*, so nothing was compared: .* incomplete metadata"
    ):
        run_verify(folder)


@pytest.mark.usefixtures("without_matrix")
def test_code_of_a_checkpoint_is_never_run_and_its_family_is_compared(tmp_path: Path) -> None:
    """Kimi K2 as it is published: a type that transformers lacks, with code of its own beside the weights."""
    folder = write_checkpoint(tmp_path / "kimi", CONFIGS["deepseek_v3"]())
    trace = tmp_path / "ran"
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "kimi_k2",
        "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(trace)!r}, 'w').close()\n")
    found = run_verify(folder)
    assert not found.failures
    assert found.oracle is not None
    assert not trace.exists()


def test_the_matrix_notices_what_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(write_checkpoint(tmp_path, CONFIGS["qwen3_moe"]()), num_threads=1)
    prompts = [list(range(10, 34)), [5, 6, 7], list(range(50, 90))]
    with matrix.row_dependent_sums(model.ops):
        cells = {cell.name: cell.is_equal for cell in matrix.run_matrix(model, prompts, lambda phase: None)}
    assert cells["neighbours"] is False
    assert cells["chunked"] is False
    assert cells["prefix_hit"] is False
    assert matrix.negative_control(model, prompts)
    monkeypatch.setattr(matrix, "row_dependent_sums", _nothing)
    assert not matrix.negative_control(model, prompts), "right sums are no negative control"


def test_a_request_is_preempted_beside_a_window_wider_than_the_small_pool(tmp_path: Path) -> None:
    model = load(write_checkpoint(tmp_path, CONFIGS["gpt_oss"](sliding_window=128)), num_threads=1)
    cell = matrix._preempted(model, [list(range(50, 98))])
    assert cell.is_equal is True, cell.detail


class _nothing:  # noqa: N801 - stands in for a context manager of that spelling
    def __init__(self, ops: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *exception: object) -> None: ...


def test_a_blind_matrix_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "run_matrix", lambda *_: [])
    monkeypatch.setattr(probe, "negative_control", lambda *_: False)
    monkeypatch.setattr(verify, "find_spec", lambda name: None)
    found = run_verify(write_checkpoint(tmp_path, CONFIGS["llama"]()))
    assert "it proves nothing" in found.failures[0]


def rename(tensors: Mapping[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {key.replace(old, new): value for key, value in tensors.items()}


def test_tensors_that_do_not_fit_are_all_listed(tmp_path: Path) -> None:
    config = CONFIGS["olmoe"]()
    tensors = rename(random_tensors(config), "layers.1.self_attn.q_norm", "layers.1.self_attn.query_norm")
    found = run_verify(write_checkpoint(tmp_path, config, tensors=tensors))
    data = found.to_json()
    assert data["unconsumed"] == ["model.layers.1.self_attn.query_norm.weight"]
    assert data["unfilled"] == ["model.layers.1.self_attn.q_norm.weight"]
    assert not data["ok"]
    assert data["max_abs_logit_diff"] is None
    assert "fills nothing: model.layers.1.self_attn.query_norm.weight" in render(found)


@pytest.mark.usefixtures("without_matrix")
def test_known_and_unused_tensors_are_told_with_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "find_spec", lambda name: None)
    config = CONFIGS["llama"]()
    tensors = random_tensors(config) | {"model.rotary_emb.inv_freq": torch.ones(8)}
    data = run_verify(write_checkpoint(tmp_path, config, tensors=tensors)).to_json()
    assert data["known_unused"] == [
        {
            "key": "model.rotary_emb.inv_freq",
            "num_bytes": 32,
            "reason": "rotary frequencies follow from the config",
        }
    ]


@pytest.mark.parametrize("kind", ["packed", "wrapped"])
def test_tensors_are_settled_as_a_load_settles_them(tmp_path: Path, kind: str) -> None:
    if kind == "packed":
        config = CONFIGS["gpt_oss"](quantization_config={"quant_method": "mxfp4"})
        folder = write_checkpoint(tmp_path, config, layout="mxfp4")
    else:
        text = CONFIGS["llama4"]()
        config = {"model_type": "llama4", "text_config": text, "tie_word_embeddings": False}
        inner = {f"language_model.{name}": value for name, value in random_tensors(text).items()}
        folder = write_checkpoint(tmp_path, config, tensors=inner)
    load(folder, num_threads=1)
    assert probe.unsettled(str(folder)) == ([], [])
    tensors = dict(load_file(folder / "model.safetensors"))
    lost = next(name for name in sorted(tensors) if name.endswith("down_proj") or "down_proj_b" in name)
    tensors["odd.weight"] = tensors.pop(lost)
    save_file(tensors, folder / "model.safetensors")
    assert probe.unsettled(str(folder)) == (["odd.weight"], [lost])


@pytest.mark.usefixtures("without_matrix")
def test_rounded_weights_are_stated_and_not_judged(tmp_path: Path) -> None:
    found = run_verify(write_checkpoint(tmp_path, CONFIGS["olmoe"]()), format="int4-g32")
    [one] = found.passes
    assert found.failures == ()
    assert one.first_difference is None
    assert any(stage.num_far for stage in one.stages)
    assert any("weights=int4-g32 is lossy" in note for note in found.notes)


@pytest.mark.usefixtures("without_matrix")
def test_the_backend_asked_for_is_the_one_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "find_spec", lambda name: None)  # as without transformers
    folder = write_checkpoint(tmp_path, CONFIGS["olmoe"]())
    for backend in backends():
        found = run_verify(folder, backend=backend)
        assert [one.backend for one in found.passes] == [backend]
        assert f"backend {backend}" in render(found)


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    config = CONFIGS["olmoe"](model_type="some_new_moe")
    folder = write_checkpoint(tmp_path, config, tensors=random_tensors(CONFIGS["olmoe"]()))
    with pytest.raises(MoesaicError, match="unknown model type"):
        run_verify(folder)
    with pytest.raises(ConfigError, match="--tokens must be at least 1"):
        run_verify(folder, num_tokens=0)
    with pytest.raises(ConfigError, match="dtype 'float16' is unknown"):
        run_verify(folder, dtype="float16")
    with pytest.raises(
        ConfigError, match=r"no tokenizer.json, so the text of --prompts cannot be read: copy"
    ):
        run_verify(folder, prompts=tmp_path / "prompts.txt")


def test_a_tokenizer_of_another_model_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["olmoe"](vocab_size=128), has_tokenizer=True)
    with pytest.raises(
        ConfigError, match=r"tokenizer.json makes token id \d+, but .* 128 tokens \(vocab_size\)"
    ):
        run_verify(folder)


def test_what_no_prompt_reaches_is_told_with_what_helps() -> None:
    config = CONFIGS["mixtral"](sliding_window=2000, max_position_embeddings=4096)
    notes = [prompts.reach(read_config(config, name="x"), has_tokenizer=has)[1] for has in (True, False)]
    assert "no prompt reaches position 2000" in notes[0][0]
    assert notes[0][0].endswith("begins: use --prompts")
    assert notes[1][0].endswith("use --prompts, which needs the model's tokenizer.json in the folder")


def test_a_child_without_a_result_is_told(tmp_path: Path) -> None:
    job = Job(model="x", dtype=None, num_threads=1, prompts=(), num_tokens=1, folder=str(tmp_path))
    with pytest.raises(ChildFailed, match=r"the oracle process ended with status 1: .*No module named"):
        run_child("moesaic.audit.absent", "oracle", job, lambda phase: None)
    assert asdict(job)["prompts"] == ()


def test_a_child_takes_no_module_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(model="x", dtype=None, num_threads=1, prompts=(), num_tokens=1, folder=str(tmp_path))
    (tmp_path / "colorsys.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ChildFailed, match="ended with status 0"):  # the library's own does nothing
        run_child("colorsys", "oracle", job, lambda phase: None)


@pytest.mark.parametrize(("quiet_s", "shown"), [(0.01, {"oracle: thinking"}), (60.0, set())])
def test_a_phase_that_takes_long_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_s: float, shown: set[str]
) -> None:
    job = Job(model="x", dtype=None, num_threads=1, prompts=(), num_tokens=1, folder=str(tmp_path))
    (tmp_path / "thinks.py").write_text("import time\nprint('thinking', flush=True)\ntime.sleep(0.3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(child, "QUIET_S", quiet_s)
    said: list[str] = []
    with pytest.raises(ChildFailed, match="ended with status 0"):  # and left no result
        run_child("thinks", "oracle", job, said.append)
    assert set(said) - {"oracle: starting"} == shown


def test_a_child_that_was_killed_is_no_missing_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(model="x", dtype=None, num_threads=1, prompts=(), num_tokens=1, folder=str(tmp_path))
    (tmp_path / "kills_itself.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ChildKilled, match=r"ended by signal 9, so nothing was decided.*memory ran out"):
        run_child("kills_itself", "oracle", job, lambda phase: None)


def test_the_command_fails_with_3_and_prints_json_all_the_same(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "right", CONFIGS["olmoe"]())
    other = write_checkpoint(tmp_path / "wrong", CONFIGS["olmoe"](norm_topk_prob=True))
    arguments = [
        "verify",
        str(folder),
        "--reference",
        str(other),
        "--threads",
        "1",
        "--tokens",
        "2",
        "--json",
    ]
    done = subprocess.run([sys.executable, "-m", "moesaic", *arguments], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    data = json.loads(done.stdout)
    assert data["first_differing_layer"] == 0
    assert data["ok"] is False
    memory = [data["passes"][0][key]["oracle"] for key in ("peak_rss_bytes", "peak_own_bytes")]
    assert memory[0] >= memory[1] > 10_000_000
    assert data["passes"][0]["seconds"]["oracle"] > 0


@pytest.mark.long
def test_neither_side_holds_the_weights_twice(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_experts": 32, "num_hidden_layers": 8}
    folder = write_checkpoint(tmp_path, CONFIGS["olmoe"](**sizes), dtype=torch.bfloat16)
    weights = (folder / "model.safetensors").stat().st_size
    arguments = ["verify", str(folder), "--dtype", "bfloat16", "--threads", "1", "--tokens", "2", "--json"]
    done = subprocess.run([sys.executable, "-m", "moesaic", *arguments], capture_output=True, text=True)
    peaks = json.loads(done.stdout)["passes"][0]["peak_own_bytes"]
    # A process of either kind is below 0.45 GB without a weight, and a layer is widened to twice its bytes.
    most = 450_000_000 + weights + 2 * weights // 8
    assert max(peaks.values()) < most, peaks
    assert most < 300_000_000 + 2 * weights  # a second copy would show
