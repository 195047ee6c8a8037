"""GGUF files are read for what they say, and whatever is wrong with one is an error, never a crash."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from gguf_files import from_config, gguf_bytes, metadata_of, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.account.memory import kv_footprint
from moesaic.account.params import count_params
from moesaic.audit.inspect import dump_json, inspect
from moesaic.cli.inspect import render
from moesaic.errors import CheckpointError, ConfigError, MoesaicError
from moesaic.interop.gguf import MAX_KEPT, Omitted, read_gguf
from moesaic.interop.gguf_config import EXACT, read_spec
from moesaic.spec.families import read_config
from moesaic.spec.locate import preset

ARCHES = {
    "llama": "mixtral-8x7b",
    "olmoe": "olmoe-1b-7b",
    "qwen2moe": "qwen1.5-moe-a2.7b",
    "qwen3moe": "qwen3-30b-a3b",
    "glm4moe": "glm-4.5-air",
    "gpt-oss": "gpt-oss-20b",
    "granitemoe": "granite-3.1-3b-a800m",
    "deepseek2": "deepseek-v2-lite",
    "deepseek2/v3": "deepseek-v3",
}
TINY = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "expert_count": 8,
    "expert_used_count": 2,
}
TENSORS = {
    "token_embd.weight": ("F16", (64, 100)),
    "output.weight": ("Q8_0", (64, 100)),
    "blk.0.ffn_gate_exps.weight": ("Q4_K", (256, 2, 8)),
    "blk.0.ffn_gate_inp.weight": ("F32", (64, 8)),
}


@pytest.mark.parametrize("arch", ARCHES)
def test_sizes_come_out_as_in_the_config(tmp_path: Path, arch: str) -> None:
    config = dict(preset(ARCHES[arch]).config)
    config.pop("quantization_config", None)
    metadata, tensors = from_config(arch.split("/")[0], config)
    # Infos of the true sizes over a file without data would be cut short: the embedding says the vocabulary.
    metadata |= {f"{arch.split('/')[0]}.vocab_size": config["vocab_size"]}
    tensors = {name: (kind, shape[:1]) for name, (kind, shape) in tensors.items()}
    spec = read_spec(read_gguf(write_gguf(tmp_path / "x.gguf", metadata, tensors)))
    expected = read_config(config, name=arch)
    assert spec.reader == "exact"
    assert spec.model_type == expected.model_type
    assert count_params(spec) == count_params(expected)
    assert kv_footprint(spec) == kv_footprint(expected)
    assert [i for i, _ in spec.moe_layers] == [i for i, _ in expected.moe_layers]
    assert [(m.num_experts, m.experts_per_token, m.gate) for _, m in spec.moe_layers] == [
        (m.num_experts, m.experts_per_token, m.gate) for _, m in expected.moe_layers
    ]
    assert not spec.is_runnable
    assert "GGUF" in spec.runnable_reasons[0]


def test_every_exact_architecture_is_compared() -> None:
    assert {arch.split("/")[0] for arch in ARCHES} == set(EXACT)


def test_inspect_tells_types_bytes_and_why_it_does_not_run(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", metadata_of("llama", TINY), TENSORS)
    found = inspect(str(path))
    data = json.loads(dump_json(found))
    assert (data["kind"], data["model_type"], data["num_experts"]) == ("gguf", "mixtral", 8)
    assert data["bytes_by_tensor_type"] == {
        "F16": 12_800,
        "Q8_0": 6_800,
        "Q4_K": 256 * 2 * 8 // 256 * 144,
        "F32": 2048,
    }
    assert data["weight_bytes"] == sum(data["bytes_by_tensor_type"].values())
    assert data["weight_bytes_by_component"]["router"] == 2048
    text = render(found)
    assert "runs        no" in text
    assert "give the model's folder of safetensors" in text
    assert "the tensors hold" in text, "the file lacks most of what its metadata describes"


def test_an_unknown_architecture_is_read_by_the_usual_keys(tmp_path: Path) -> None:
    found = inspect(str(write_gguf(tmp_path / "x.gguf", metadata_of("newmoe", TINY), TENSORS)))
    assert (found.reader, found.model_type, found.num_experts) == ("generic", "newmoe", 8)
    assert any("newmoe is read by the usual keys" in reason for reason in found.reasons)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"olmoe.embedding_length": None}, r"x.gguf: olmoe.embedding_length is missing"),
        ({"olmoe.expert_used_count": 9}, r"olmoe.expert_used_count must be at most olmoe.expert_count \(8\)"),
        ({"olmoe.block_count": 0}, r"olmoe.block_count must be between 1 and"),
        ({"olmoe.expert_used_count": None}, r"olmoe.expert_used_count is missing; .*expert_count is 8"),
    ],
    ids=str,
)
def test_what_is_wrong_is_told_with_the_key_of_the_file(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    metadata = metadata_of("olmoe", TINY) | {"olmoe.vocab_size": 64} | change
    given = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(ConfigError, match=words):
        inspect(str(write_gguf(tmp_path / "x.gguf", given, {})))


def test_split_files_are_one(tmp_path: Path) -> None:
    names = list(TENSORS)
    parts = [tmp_path / f"big-{i + 1:05d}-of-00002.gguf" for i in range(2)]
    write_gguf(parts[0], metadata_of("llama", TINY) | {"split.count": 2}, {names[0]: TENSORS[names[0]]})
    write_gguf(parts[1], {"split.no": 1}, {name: TENSORS[name] for name in names[1:]})
    for path in parts:
        file = read_gguf(path)
        assert [tensor.name for tensor in file.tensors] == names
        assert (file.path, file.missing) == (parts[0], ())
    parts[1].unlink()
    found = inspect(str(parts[0]))
    assert found.notes[0] == "1 parts are missing: big-00002-of-00002.gguf"
    parts[0].rename(tmp_path / "big-00003-of-00003.gguf")
    with pytest.raises(CheckpointError, match=r"big-00001-of-00003.gguf is missing: the first part"):
        read_gguf(tmp_path / "big-00003-of-00003.gguf")


def test_long_arrays_are_counted_and_not_kept(tmp_path: Path) -> None:
    metadata = {"tokens": ["t"] * (MAX_KEPT + 1), "few": [1, 2], "last": "end"}
    file = read_gguf(write_gguf(tmp_path / "x.gguf", metadata))
    assert file.metadata["tokens"] == Omitted(num_items=MAX_KEPT + 1)
    assert (file.metadata["few"], file.metadata["last"]) == ((1, 2), "end")


def head(num_tensors: int = 0, num_pairs: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_pairs)


def info(*shape: int, kind: int = 0) -> bytes:
    return (
        head(1) + struct.pack("<Q", 1) + b"t" + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, 0)
    )


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "4 bytes of its first word are due at byte 0, the file has 0"),
        (b"GGML" + bytes(20), "does not begin with GGUF"),
        (head(version=1), "GGUF version 1; 2 and 3 are read"),
        (head(version=3 << 24), "it is big-endian"),
        (head(num_tensors=2**60), f"announces {2**60} tensors in 0 bytes"),
        (head(num_pairs=2**63), f"announces {2**63} pairs in 0 bytes"),
        (head(num_pairs=1) + struct.pack("<Q", 2**62) + bytes(9), f"{2**62} bytes of a key are due"),
        (head(num_pairs=1) + struct.pack("<QII", 0, 99, 0) + bytes(9), "value type 99"),
        (head(num_pairs=1) + struct.pack("<QIIQ", 0, 9, 4, 2**61), f"announces {2**61} items"),
        (head(num_pairs=1) + struct.pack("<QIIQ", 0, 9, 8, 2**61), f"announces {2**61} items"),
        (
            head(num_pairs=1) + struct.pack("<QI", 0, 9) + struct.pack("<IQ", 9, 1) * 8 + bytes(99),
            "nests arrays",
        ),
        (info(2**40), "no general.architecture"),
        (info(1, 1, 1, 1, 1), "5 dims, more than 4"),
        (info(33, kind=8), "rows of 33 in blocks of 32"),
        (info(1, kind=77), "tensor type 77, which this version does not know"),
        (gguf_bytes({"general.alignment": 7}), "not a multiple of 8"),
        (gguf_bytes({"general.name": "x"}), "no general.architecture"),
    ],
)
def test_what_is_absurd_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(MoesaicError) as caught:
        inspect(str(path))
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_cut_anywhere_is_an_error_or_noted(tmp_path: Path) -> None:
    metadata = metadata_of("llama", TINY) | {"tokens": ["a", "bc"], "scores": [0.5, 1.5], "flag": True}
    data = gguf_bytes(metadata, TENSORS)
    described = data.rindex(b"ffn_gate_inp.weight") + len(b"ffn_gate_inp.weight") + 4 + 2 * 8 + 4 + 8
    path = tmp_path / "x.gguf"
    for size in range(described):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            read_gguf(path)
    for size in (*range(described, len(data), 997), len(data) - 1):
        path.write_bytes(data[:size])
        (note,) = read_gguf(path).cut
        assert f"{path} is cut short: its tensors end at byte {len(data)}, the file at {size}" in note
    assert note in inspect(str(path)).notes
    path.write_bytes(data)
    whole = read_gguf(path)
    assert (len(whole.tensors), whole.cut) == (len(TENSORS), ())


SOUND = gguf_bytes(metadata_of("qwen3moe", TINY | {"x": [1, 2, 3]}) | {"t": ["a", "b"]}, TENSORS)


@settings(max_examples=60)
@given(st.data())
def test_damaged_files_are_errors_or_readings(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    changed = bytearray(SOUND[: SOUND.rindex(b"ffn_gate_inp") + 100])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed) - 9))
        new = data.draw(st.binary(min_size=1, max_size=8))
        changed[at : at + len(new)] = new
    path = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    path.write_bytes(bytes(changed) + bytes(data.draw(st.sampled_from([0, 30_000]))))
    tracemalloc.start()
    with suppress(MoesaicError):
        inspect(str(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000_000


@given(st.binary(max_size=200))
def test_noise_is_an_error(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + noise)
    with pytest.raises(MoesaicError):
        inspect(str(path))


def test_serving_one_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", metadata_of("llama", TINY), TENSORS)
    done = subprocess.run(
        [sys.executable, "-m", "moesaic", "serve", str(path)], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "is a GGUF file, whose weights are not run yet" in done.stderr
    assert "folder of safetensors" in done.stderr
