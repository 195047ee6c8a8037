"""Files of torch.save without torch: what data may be, and that nothing in a file is ever run."""

import collections
import contextlib
import io
import os
import pickle
import random
import subprocess
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from moesaic.errors import ConfigError
from moesaic.interop.torch_file import read_torch, torch_bytes


def archive(program, **storages):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        made.writestr("x/data.pkl", program)
        for key, data in storages.items():
            made.writestr(f"x/data/{key.removeprefix('k')}", data)
    return buffer.getvalue()


@pytest.fixture
def written(tmp_path):
    def write(data, name="dump.pt"):
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write


def test_what_we_write_we_read(written):
    data = {
        "rank": 3,
        "logical_count": np.arange(24, dtype=np.int32).reshape(2, 3, 4),
        "average": np.linspace(0, 1, 5),
        "records": [{"name": "x", "ids": [1, -2, 2**40]}],
    }
    found = read_torch(written(torch_bytes(data)))
    assert found["rank"] == 3
    assert found["records"] == data["records"]
    for name in ("logical_count", "average"):
        assert found[name].dtype == data[name].dtype
        assert np.array_equal(found[name], data[name])
    assert not found["logical_count"].flags.writeable


def test_torch_reads_what_we_write_and_we_read_what_it_writes(written):
    torch = pytest.importorskip("torch")
    counts = np.arange(6, dtype=np.int64).reshape(2, 3)
    path = written(torch_bytes({"logical_count": counts}))
    assert torch.equal(torch.load(path, weights_only=True)["logical_count"], torch.from_numpy(counts))
    data = {
        "plain": torch.arange(24, dtype=torch.int32).reshape(2, 3, 4),
        "turned": torch.randn(3, 4).T,
        "part": torch.arange(10)[3:7:2],
        "none": torch.zeros(0, 3),
        "half": torch.ones(2, dtype=torch.float16),
        "more": [1, -5, 2**40, None, True, 1.5, "text", (1, 2)],
        "ordered": collections.OrderedDict(a=1),
    }
    torch.save(data, path)
    found = read_torch(path)
    for name in ("plain", "turned", "part", "none", "half"):
        assert np.array_equal(found[name], data[name].numpy())
    assert found["more"] == data["more"]
    assert found["ordered"] == {"a": 1}


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


def attacks(mark):
    return {
        "system": pickle.dumps(Runs(os.system, f"touch {mark}")),
        "protocol 0": pickle.dumps(Runs(os.system, f"touch {mark}"), protocol=0),
        "protocol 2": pickle.dumps({"logical_count": Runs(os.system, f"touch {mark}")}, protocol=2),
        "subprocess": pickle.dumps(Runs(subprocess.check_call, ["touch", str(mark)])),
        "eval": pickle.dumps([Runs(eval, f"open({str(mark)!r}, 'w')")]),
        "class": pickle.dumps(collections.Counter("ab")),
        "numpy": pickle.dumps(np.arange(3)),
        "dotted": b"\x80\x04\x8c\x0bcollections\x8c\x16OrderedDict.fromkeys.x\x93.",
        "storage as a call": b"\x80\x02ctorch\nFloatStorage\n(X\x01\x00\x00\x00atR.",
        "ordered with arguments": b"\x80\x02ccollections\nOrderedDict\n((X\x01\x00\x00\x00aK\x01ttR.",
        "build": b"\x80\x02}X\x01\x00\x00\x00ab.",
        "instance": b"(S'touch'\nios\nsystem\n.",
        "extension": b"\x80\x02\x82\x01.",
    }


@pytest.mark.parametrize("kind", attacks("x"))
def test_what_wants_to_run_is_refused_and_does_not_run(kind, written, tmp_path):
    mark = tmp_path / "mark"
    path = written(archive(attacks(mark)[kind]))
    with pytest.raises(ConfigError, match=r"dump.pt: it wants to use .*was not opened"):
        read_torch(path)
    assert not mark.exists()


def test_the_attacks_do_run_elsewhere(tmp_path):
    mark = tmp_path / "mark"
    pickle.loads(attacks(mark)["system"])
    assert mark.exists()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (b"\x80\x02}(X\x01\x00\x00\x00a", "damaged"),
        (b"\x80\x02h\x07.", "damaged"),
        (b"\x80\x02t.", "damaged"),
        (b"\x80\x02.", "damaged"),
        (b"", "damaged"),
        (b"\xff\xff", "damaged"),
        (b"\x80\x02}" + b"(" * 3 + b"u.", "damaged"),
    ],
)
def test_damaged_programs_are_errors(program, words, written):
    with pytest.raises(ConfigError, match=words):
        read_torch(written(archive(program)))


def with_tensor(numel=6, start=0, shape=(2, 3), strides=(3, 1)):
    """A tensor whose numbers say what they like about a storage of six int32."""

    def number(value):
        return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)

    def numbers(values):
        return b"(" + b"".join(number(v) for v in values) + b"t"

    storage = b"(X\x07\x00\x00\x00storagectorch\nIntStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    storage += number(numel) + b"tQ"
    call = (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(start) + numbers(shape) + numbers(strides)
    )
    return archive(b"\x80\x02" + call + b"\x89}tR.", k0=np.arange(6, dtype=np.int32).tobytes())


def test_tensors_must_lie_in_their_storage(written):
    assert read_torch(written(with_tensor())).tolist() == [[0, 1, 2], [3, 4, 5]]
    for wrong in (
        {"numel": 7},
        {"start": 1},
        {"start": -1},
        {"shape": (2, 4)},
        {"strides": (300, 1)},
        {"strides": (-3, 1)},
        {"shape": (2,)},
        {"shape": (2**40, 2**40)},
        {"shape": (2**40, 1), "strides": (0, 1)},
    ):
        with pytest.raises(ConfigError, match="damaged"):
            read_torch(written(with_tensor(**wrong)))


def test_other_files_are_refused_unopened(written, tmp_path):
    with pytest.raises(ConfigError, match="a bare pickle, which can run code"):
        read_torch(written(pickle.dumps(Runs(os.system, f"touch {tmp_path}/mark"))))
    assert not (tmp_path / "mark").exists()
    with pytest.raises(ConfigError, match="other data"):
        read_torch(written(b"hello"))
    with pytest.raises(ConfigError, match="damaged zip"):
        read_torch(written(b"PK\x03\x04" + b"0" * 100))
    with pytest.raises(ConfigError, match=r"one data.pkl, this one 0"):
        read_torch(written(archive(b"")[:0] + _empty_zip()))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_torch(tmp_path / "absent.pt")


def _empty_zip():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        made.writestr("x/other", b"")
    return buffer.getvalue()


def test_big_endian_and_oversized_objects_are_refused(written, monkeypatch):
    data = torch_bytes({"a": np.arange(3, dtype=np.int32)})
    path = written(data.replace(b"little", b"bigger"))
    with pytest.raises(ConfigError, match=r"big-endian|damaged"):
        read_torch(path)
    monkeypatch.setattr("moesaic.interop.torch_file.MAX_PICKLE_BYTES", 10)
    with pytest.raises(ConfigError, match=r"its objects take .* beside the tensors"):
        read_torch(written(data))


@given(st.integers(0, 10**9))
@limits(max_examples=150)
def test_a_spoilt_program_is_read_or_refused_and_nothing_else(tmp_path_factory, seed):
    rng = random.Random(seed)
    with zipfile.ZipFile(io.BytesIO(with_tensor())) as made:
        program = bytearray(made.read("x/data.pkl"))
    for _ in range(rng.randint(1, 4)):
        program[rng.randrange(len(program))] = rng.randrange(256)
    path = tmp_path_factory.getbasetemp() / "spoilt.pt"
    path.write_bytes(archive(bytes(program), k0=np.arange(6, dtype=np.int32).tobytes()))
    with contextlib.suppress(ConfigError):
        read_torch(path)


def test_a_small_file_that_unpacks_to_many_objects_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + b"N0" * 50_000 + b"N.")
    assert path.stat().st_size < 2000
    assert read_torch(path) is None
    monkeypatch.setattr("moesaic.interop.torch_file.MAX_STEPS", 10_000)
    with pytest.raises(ConfigError, match="over 10,000 objects"):
        read_torch(path)


def test_an_endless_byte_order_is_not_read(tmp_path):
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02N.")
        archive.writestr("archive/byteorder", b"little" + b" " * 10_000)
    with pytest.raises(ConfigError, match="big-endian"):
        read_torch(path)
