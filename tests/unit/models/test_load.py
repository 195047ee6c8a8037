"""Loading whole folders: dtypes, refusals before anything is read, progress, ties, memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import (
    CONFIGS,
    deepseek_v3_config,
    llama_config,
    mixtral_config,
    qwen3_moe_config,
    random_tensors,
    write_checkpoint,
    write_tensors,
)
from paged import PagedModel, random_tokens
from torch import Tensor

from moesaic.errors import CheckpointError, ConfigError, HostMemoryShort, UnsupportedModelError
from moesaic.models.build import LoadedModel, load
from moesaic.models.checkpoint import Checkpoint


def logits_of(model: LoadedModel) -> Tensor:
    return PagedModel(model).run("r", random_tokens(40, model.spec.vocab, seed=3))


@pytest.mark.parametrize("family", CONFIGS)
def test_says_what_was_loaded(tmp_path: Path, family: str) -> None:
    config = CONFIGS[family]()
    folder = write_checkpoint(tmp_path, config)
    seen: list[tuple[int, int]] = []
    model = load(folder, num_threads=1, progress=lambda done, total: seen.append((done, total)))
    checkpoint = Checkpoint.open(folder)
    assert model.weight_bytes == checkpoint.num_bytes  # float32 throughout
    assert model.numerics.seam_dtype == "float32"
    assert model.accounting.unused == ()
    assert (model.store is not None) == (family != "llama")
    assert seen[-1] == (checkpoint.num_bytes, checkpoint.num_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    is_native = model.numerics.backend.startswith("native/")
    assert is_native == (model.proof.shapes == ()), "native kernels have nothing to prove"
    assert len(model.model_digest) == 32


def test_float16_loads_as_float32_exactly(tmp_path: Path) -> None:
    half = {name: value.half() for name, value in random_tensors(qwen3_moe_config()).items()}
    wide = {name: value.float() for name, value in half.items()}
    first = load(
        write_checkpoint(tmp_path / "half", qwen3_moe_config(), tensors=half, dtype=torch.float16),
        num_threads=1,
    )
    second = load(write_checkpoint(tmp_path / "wide", qwen3_moe_config(), tensors=wide), num_threads=1)
    assert first.numerics.seam_dtype == "float32"
    assert torch.equal(logits_of(first), logits_of(second))


def test_dtype_can_be_chosen(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "wide", deepseek_v3_config())
    rounded = {name: value.bfloat16() for name, value in random_tensors(deepseek_v3_config()).items()}
    for name, value in random_tensors(deepseek_v3_config()).items():
        if "mlp.gate." in name:  # routers are kept as they are stored
            rounded[name] = value
    narrow = load(folder, num_threads=1, dtype="bfloat16")
    assert narrow.numerics.seam_dtype == "bfloat16"
    assert narrow.weight_bytes < 0.6 * load(folder, num_threads=1).weight_bytes
    config = json.loads((folder / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    stored = tmp_path / "narrow"
    stored.mkdir()
    (stored / "config.json").write_text(json.dumps(config))
    write_tensors(stored, rounded)
    assert torch.equal(logits_of(narrow), logits_of(load(stored, num_threads=1)))


def test_a_missing_or_broken_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no folder .*nowhere; .*download the model first"):
        load(tmp_path / "nowhere", num_threads=1)
    write_checkpoint(tmp_path, llama_config())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not valid JSON"):
        load(tmp_path, num_threads=1)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load(tmp_path, num_threads=1)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json; a model folder holds"):
        load(tmp_path, num_threads=1)


def test_an_adapter_folder_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="holds an adapter"):
        load(tmp_path, num_threads=1)


def test_a_model_that_does_not_run_is_refused_by_name(tmp_path: Path) -> None:
    config = llama_config(model_type="qwen3_vl_moe", num_experts=16)
    write_checkpoint(tmp_path, llama_config())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnsupportedModelError, match=r"qwen3_vl_moe is not run by this build: .*types that run: .*kimi_k2, "
    ):
        load(tmp_path, num_threads=1)


def test_memory_is_checked_before_anything_is_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, mixtral_config())
    need = (
        load(folder, num_threads=1).weight_bytes + Checkpoint.open(folder).tensors["lm_head.weight"].num_bytes
    )
    seen: list[int] = []
    with pytest.raises(HostMemoryShort, match=r"needs .* \(weights in float32 .*and .* are available"):
        load(folder, num_threads=1, available_bytes=need - 1, progress=lambda done, _: seen.append(done))
    assert not seen
    load(folder, num_threads=1, available_bytes=need)


@pytest.mark.parametrize("layout", ["per_expert", "stacked"])
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, layout: str) -> None:
    tensors = random_tensors(mixtral_config())
    tensors["model.layers.1.block_sparse_moe.experts.5.w2.weight"][7, 3] = float("nan")
    folder = write_checkpoint(tmp_path, mixtral_config(), tensors=tensors, layout=layout)  # type: ignore[arg-type]
    name = "down_proj" if layout == "stacked" else r"experts\.5\.w2"
    with pytest.raises(CheckpointError, match=rf"layers\.1\..*{name}.* holds 1 values that are NaN"):
        load(folder, num_threads=1)


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    head = tensors["model.embed_tokens.weight"].clone()
    same = load(write_checkpoint(tmp_path, config, tensors=tensors | {"lm_head.weight": head}), num_threads=1)
    assert same.decoder.head.weight_VD is same.decoder.embedding_VD
    assert [tensor.key for tensor in same.accounting.unused] == ["lm_head.weight"]
    head = head.clone()
    head[3, 4] += 1
    write_checkpoint(tmp_path, config, tensors=tensors | {"lm_head.weight": head})
    with pytest.raises(CheckpointError, match=r"ties the head to the embedding, but lm_head\.weight differs"):
        load(tmp_path, num_threads=1)


_MEASURE = """
import sys, torch
sys.path.insert(0, sys.argv[2])
from moesaic.models.build import load
from moesaic.models.checkpoint import Checkpoint

def status(name):
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

small, folder = sys.argv[3], sys.argv[1]
keep = load(small, num_threads=1)  # whatever a first load allocates once
before = status("RssAnon")
peak = 0
def watch(done, total):
    global peak
    peak = max(peak, status("RssAnon"))
model = load(folder, num_threads=1, progress=watch)
checkpoint = Checkpoint.open(folder)
print(peak - before, status("RssAnon") - before, model.weight_bytes,
      max(tensor.num_bytes for tensor in checkpoint.tensors.values()))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
@pytest.mark.parametrize("layout", ["per_expert", "stacked"])
def test_a_load_takes_the_weights_and_one_tensor(tmp_path: Path, layout: str) -> None:
    config = qwen3_moe_config(
        hidden_size=256, vocab_size=8192, moe_intermediate_size=256, num_hidden_layers=6
    )
    folder = write_checkpoint(tmp_path / "large", config, layout=layout)  # type: ignore[arg-type]
    small = write_checkpoint(tmp_path / "small", qwen3_moe_config())
    tests = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(folder), tests, str(small)],
        capture_output=True,
        text=True,
        check=True,
    )
    peak, after, weights, largest = map(int, done.stdout.split())
    assert weights > 40e6
    assert peak <= 1.1 * (weights + largest)
    assert after <= 1.1 * (weights + largest)  # malloc keeps some of what the proof and the reads freed
