"""Reading safetensors folders: every way to be damaged is an error that names the file and the key."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import write_tensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from moesaic.errors import CheckpointError
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.headers import SINGLE_FILE
from moesaic.spec.folder import INDEX_FILE
from moesaic.spec.safetensors import read_header

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.linspace(-1, 1, 10).to(torch.bfloat16).reshape(2, 5),
    "c.bias": torch.tensor([0.5, -0.0], dtype=torch.float16),
    "d": torch.tensor(3.25),
    "e": torch.zeros(0, 4),
}


def raw_file(file: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def entry(dtype: str = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("num_files", [1, 3])
def test_reads_what_was_written(tmp_path: Path, num_files: int) -> None:
    write_tensors(tmp_path, TENSORS, num_files)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.names == set(TENSORS)
    assert checkpoint.num_bytes == sum(value.numel() * value.element_size() for value in TENSORS.values())
    for name, value in TENSORS.items():
        read = checkpoint.read(name, shape=tuple(value.shape))
        assert read.dtype == value.dtype
        assert torch.equal(
            read.view(torch.uint8 if value.dim() else read.dtype),
            value.view(torch.uint8 if value.dim() else value.dtype),
        )


def test_items_are_slices_of_the_first_dim(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS)
    checkpoint = Checkpoint.open(tmp_path)
    items = [checkpoint.read_item("a.weight", i, shape=(3, 4)) for i in range(3)]
    assert torch.equal(torch.stack(items), TENSORS["a.weight"])


def digests_of(folder: Path, tensors: dict[str, torch.Tensor], num_files: int = 1) -> dict[str, str]:
    folder.mkdir()
    write_tensors(folder, tensors, num_files)
    checkpoint = Checkpoint.open(folder)
    for name in sorted(tensors, reverse=num_files > 1):
        checkpoint.read(name)
        checkpoint.read(name)  # a second look changes nothing
    return checkpoint.digests()


def test_digests_are_the_weights(tmp_path: Path) -> None:
    changed = TENSORS | {"a.weight": TENSORS["a.weight"].clone().index_fill_(1, torch.tensor(3), 7.0)}
    base = digests_of(tmp_path / "a", TENSORS)
    assert base.keys() == TENSORS.keys()
    assert digests_of(tmp_path / "b", TENSORS, num_files=2) == base
    other = digests_of(tmp_path / "c", changed)
    assert [name for name in base if other[name] != base[name]] == ["a.weight"]


def test_items_have_digests_whoever_reads_which_of_them(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS)
    whole, *parts = (Checkpoint.open(tmp_path) for _ in range(3))
    for i in (0, 1, 2):
        whole.read_item("a.weight", i)
        parts[i % 2].read_item("a.weight", i)
    assert parts[0].digests() | parts[1].digests() == whole.digests()
    assert len(set(whole.digests().values())) == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_refuses_weights_that_are_not_finite(tmp_path: Path, bad: float, dtype: torch.dtype) -> None:
    value = torch.zeros(5, 7, dtype=dtype)
    value[3, 2] = bad
    write_tensors(tmp_path, {"x.weight": value})
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"x\.weight in .*model\.safetensors holds 1 values .* element 23"
    ):
        checkpoint.read("x.weight")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.read_item("x.weight", 2).isfinite().all()
    with pytest.raises(CheckpointError, match="element 23"):
        checkpoint.read_item("x.weight", 3)


def test_largest_finite_values_pass(tmp_path: Path) -> None:
    value = torch.full((4,), torch.finfo(torch.float32).max)
    write_tensors(tmp_path, {"x": value})
    assert torch.equal(Checkpoint.open(tmp_path).read("x"), value)


def test_wrong_shape_names_both(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS)
    with pytest.raises(CheckpointError, match=r"a\.weight in .* has shape \[3, 4\].* implies \[4, 3\]"):
        Checkpoint.open(tmp_path).read("a.weight", shape=(4, 3))


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int64, torch.float64, torch.float8_e4m3fn, torch.bool]
)
def test_wrong_dtype_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    write_tensors(tmp_path, {"x.weight": torch.zeros(2, 2).to(dtype)})
    with pytest.raises(CheckpointError, match=r"x\.weight in .* has dtype \w+ where a float weight is due"):
        Checkpoint.open(tmp_path).read("x.weight")


def test_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS)
    with pytest.raises(CheckpointError, match=r"no tensor a\.weigth; did you mean a\.weight"):
        Checkpoint.open(tmp_path).read("a.weigth")


def test_missing_folder_and_file_instead_of_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no folder .*download"):
        Checkpoint.open(tmp_path / "Qwen" / "Qwen3-30B-A3B")
    write_tensors(tmp_path, TENSORS)
    with pytest.raises(CheckpointError, match="is a file; give the folder"):
        Checkpoint.open(tmp_path / SINGLE_FILE)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_a_pickle_is_refused_unopened(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    (tmp_path / name).chmod(0)
    with pytest.raises(CheckpointError, match=rf"pickle \({name}\).*never read; convert"):
        Checkpoint.open(tmp_path)


def test_a_folder_without_weights_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no safetensors files \(it has: config\.json\)"):
        Checkpoint.open(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"holds weights\.safetensors but neither"):
        Checkpoint.open(tmp_path)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"adapter.*merge"):
        Checkpoint.open(tmp_path)


def test_missing_shard_names_it_and_its_tensors(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS, num_files=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"lists model-00002-of-00002\.safetensors.*2 tensors \(b\.weight, d\)"
    ):
        Checkpoint.open(tmp_path)


def edited_index(folder: Path, edit: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    edit(index["weight_map"])
    (folder / INDEX_FILE).write_text(json.dumps(index))


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS, num_files=2)
    original = (tmp_path / INDEX_FILE).read_text()
    first = "model-00001-of-00002.safetensors"

    edited_index(tmp_path, lambda placed: placed.update({"ghost.weight": first}))
    with pytest.raises(CheckpointError, match=r"places ghost\.weight in .*no shard has it"):
        Checkpoint.open(tmp_path)
    (tmp_path / INDEX_FILE).write_text(original)
    edited_index(tmp_path, lambda placed: placed.update({"b.weight": first}))
    with pytest.raises(CheckpointError, match=r"places b\.weight in .*it is in model-00002"):
        Checkpoint.open(tmp_path)
    (tmp_path / INDEX_FILE).write_text(original)
    edited_index(tmp_path, lambda placed: placed.pop("b.weight"))
    with pytest.raises(CheckpointError, match=r"does not list 1 tensors .* such as b\.weight"):
        Checkpoint.open(tmp_path)


def test_a_key_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS, num_files=2)
    save_file(
        {"b.weight": TENSORS["b.weight"], "d": TENSORS["d"], "a.weight": TENSORS["a.weight"]},
        tmp_path / "model-00002-of-00002.safetensors",
    )
    with pytest.raises(
        CheckpointError, match=r"a\.weight is stored twice: in model-00001.* and in model-00002"
    ):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "file", ["../other/model.safetensors", "/etc/passwd", "pytorch_model.bin", "a\\b.safetensors"]
)
def test_an_index_cannot_point_outside(tmp_path: Path, file: str) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"x": file}}))
    with pytest.raises(CheckpointError, match="only safetensors files of the same folder"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"x": 3}}', "nonsense", "[" * 99999]
)
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        Checkpoint.open(tmp_path)


def test_a_stale_single_file_beside_an_index(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS, num_files=2)
    write_tensors(tmp_path, TENSORS)
    with pytest.raises(CheckpointError, match="holds both"):
        Checkpoint.open(tmp_path)


def test_a_file_cut_short_at_any_byte_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS)
    whole = (tmp_path / SINGLE_FILE).read_bytes()
    for size in (*range(20), len(whole) // 2, len(whole) - 1):
        (tmp_path / SINGLE_FILE).write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            Checkpoint.open(tmp_path)
    (tmp_path / SINGLE_FILE).write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="longer than its header"):
        Checkpoint.open(tmp_path)


def test_a_file_cut_short_after_opening_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path, {"x.weight": torch.ones(1000)})
    checkpoint = Checkpoint.open(tmp_path)
    whole = (tmp_path / SINGLE_FILE).read_bytes()
    (tmp_path / SINGLE_FILE).write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match=r"ends inside x\.weight: 3990 of 4000"):
        checkpoint.read("x.weight")
    (tmp_path / SINGLE_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read at x\.weight: No such file"):
        checkpoint.read("x.weight")


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ([], b"", "not a JSON object"),
        (b"{nonsense", b"", "not the JSON"),
        (b'{"x": \xff\xfe}', b"", "not the JSON"),
        (b"[" * 5000, b"", "not the JSON"),
        (b'{"x": {"dtype": "F32"}, "x": {"dtype": "F32"}}', b"", "'x' appears twice"),
        ({"x": 3}, b"", "lacks a sound dtype"),
        ({"x": entry(offsets=[0])}, b"1234", "lacks a sound dtype"),
        ({"x": {"dtype": "F32", "shape": [1]}}, b"1234", "lacks a sound dtype"),
        ({"x": entry(dtype="F33")}, b"1234", "unknown dtype 'F33'; did you mean F32"),
        ({"x": entry(shape=[-1], offsets=[0, -4])}, b"", "not sizes"),
        ({"x": entry(shape=[1.0])}, b"1234", "not sizes"),
        ({"x": entry(shape=[True])}, b"1234", "not sizes"),
        ({"x": entry(shape=[2])}, b"1234", "takes 8 bytes, but has 4"),
        ({"x": entry(shape=[2**40, 2**40])}, b"1234", "takes"),
        ({"x": entry(), "y": entry()}, b"1234", "neither overlap nor leave holes"),
        ({"x": entry(offsets=[4, 8])}, b"12345678", "neither overlap nor leave holes"),
    ],
)  # fmt: skip
def test_an_unsound_header_is_named(tmp_path: Path, header: object, data: bytes, message: str) -> None:
    file = raw_file(tmp_path / SINGLE_FILE, header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(tmp_path)
    assert str(file) in str(caught.value)


def test_absurd_header_size_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(CheckpointError, match="announce a header of 4611686018427387904"):
        Checkpoint.open(tmp_path)


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    (tmp_path / SINGLE_FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    with pytest.raises(CheckpointError, match=r"Git LFS pointer.*git lfs pull"):
        Checkpoint.open(tmp_path)


@given(st.binary(max_size=200))
def test_no_header_crashes_the_reader(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    file = raw_file(tmp_path_factory.getbasetemp() / "fuzzed.safetensors", text)
    if text.strip() != b"{}":  # an empty object is a sound header of no tensors
        with pytest.raises(CheckpointError, match=r"fuzzed\.safetensors"):
            read_header(file)
