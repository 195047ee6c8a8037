"""Where weights lie: shared between processes, spread over NUMA nodes, refused where they do not fit."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import (
    CONFIGS,
    cheap_cases,
    mixtral_config,
    qwen3_moe_config,
    random_tensors,
    write_checkpoint,
)
from paged import PagedModel, random_tokens
from torch import Tensor

from moesaic.errors import ConfigError, HostMemoryShort
from moesaic.kernels.huge_pages import HUGE_BYTES
from moesaic.kernels.nodes import Node
from moesaic.kernels.ops import backends
from moesaic.models import home as home_module
from moesaic.models.build import LoadedModel, load
from moesaic.models.home import Home, abandoned_weights

GB = 10**9


def logits_of(model: LoadedModel) -> Tensor:
    return PagedModel(model).run("r", random_tokens(24, model.spec.vocab, seed=3))


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A folder that files of weights are put in; a plain one is mapped as well as /dev/shm is."""
    folder = tmp_path / "shm"
    folder.mkdir()
    yield folder
    assert list(folder.iterdir()) == [], "the last to leave removes them"


def notes_of(model: LoadedModel, about: str) -> list[str]:
    return [note for note in model.notes if note.startswith(about)]


# ---- shared ----


@pytest.mark.parametrize("family", cheap_cases())
def test_who_finds_the_weights_computes_as_who_put_them_there(
    tmp_path: Path, shared: Path, family: str
) -> None:
    """On pages that cannot be written, for both of them."""
    folder = write_checkpoint(tmp_path / "model", CONFIGS[family]())
    home = Home(shared_in=shared)
    alone, first, second = (load(folder, num_threads=1, home=one) for one in (None, home, home))
    expected = logits_of(alone)
    for model in (first, second):
        assert torch.equal(logits_of(model), expected)
        assert model.model_digest == alone.model_digest
        assert model.weight_bytes == alone.weight_bytes
    assert "0 B were found" in notes_of(first, "shared weights")[0]
    assert "and 0 B put there" in notes_of(second, "shared weights")[0]


@pytest.mark.parametrize("backend", [name for name in backends() if name != "reference"])
def test_integer_weights_are_shared_on_every_level(tmp_path: Path, shared: Path, backend: str) -> None:
    folder = write_checkpoint(tmp_path / "model", mixtral_config(tie_word_embeddings=True))
    options: dict[str, Any] = {"num_threads": 1, "format": "int4-g32", "backend": backend}
    expected = logits_of(load(folder, **options))
    kept = [load(folder, **options, home=Home(shared_in=shared)) for _ in range(2)]
    assert all(torch.equal(logits_of(model), expected) for model in kept)


def test_two_processes_hold_the_bytes_once(tmp_path: Path, shared: Path) -> None:
    config = qwen3_moe_config(vocab_size=8192, hidden_size=256)
    folder = write_checkpoint(tmp_path / "model", config)
    model = load(folder, num_threads=1, home=Home(shared_in=shared))
    expected = logits_of(model)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        found = load(folder, num_threads=1, home=Home(shared_in=shared))
        # The parent's mapping, which the fork has left here too, is not the one that counts.
        is_same = torch.equal(logits_of(found), expected) and found.model_digest == model.model_digest
        del found
        os.write(writer, f"{is_same} {len(mapped(os.getpid()))}".encode())
        os._exit(0)
    os.close(writer)
    said = os.read(reader, 100).decode()
    assert os.waitpid(child, 0)[1] == 0
    assert said == "True 2"
    assert mapped(os.getpid()) == {str(path): "r--s" for path in shared.iterdir()}


def mapped(process_id: int) -> dict[str, str]:
    """Files of weights that a process maps, with the rights it has to them."""
    lines = Path(f"/proc/{process_id}/maps").read_text().splitlines()
    return {line.split()[-1]: line.split()[1] for line in lines if "/moesaic-weights-" in line}


def test_nothing_is_shared_between_files_that_differ_only_in_their_bytes(
    tmp_path: Path, shared: Path
) -> None:
    config = qwen3_moe_config()
    tensors = random_tensors(config)
    folder = write_checkpoint(tmp_path / "one", config, tensors=tensors)
    home = Home(shared_in=shared)
    first = load(folder, num_threads=1, home=home)
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    write_checkpoint(tmp_path / "other", config, tensors=tensors | {name: tensors[name] + 1})
    other = load(tmp_path / "other", num_threads=1, home=home)
    assert other.model_digest != first.model_digest
    assert not torch.equal(logits_of(other), logits_of(first))
    # The same folder, written anew while its weights are in memory.
    write_checkpoint(folder, config, tensors=tensors | {name: tensors[name] + 1})
    anew = load(folder, num_threads=1, home=home)
    assert anew.model_digest == other.model_digest
    assert torch.equal(logits_of(anew), logits_of(other))
    rounded = load(folder, num_threads=1, home=home, format="int8")
    assert "0 B were found" in notes_of(rounded, "shared weights")[0]


def run_and_die(folder: Path, home: Home) -> None:
    """Load in a process that ends without leaving anything in order."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        kept = load(folder, num_threads=1, home=home)
        os._exit(0 if kept.store is not None else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_what_killed_runs_left_is_found_used_and_removed(
    tmp_path: Path, shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path / "model", mixtral_config())
    home = Home(shared_in=shared)
    run_and_die(folder, home)
    left = abandoned_weights(shared)
    assert sorted(path.name for path, _ in left) == sorted(path.name for path in shared.iterdir())
    assert sum(num_bytes for _, num_bytes in left) >= 3 * HUGE_BYTES
    model = load(folder, num_threads=1, home=home)
    assert "and 0 B put there" in notes_of(model, "shared weights")[0]
    assert abandoned_weights(shared) == []
    del model
    run_and_die(folder, home)
    with caplog.at_level(logging.INFO, logger="moesaic"):
        load(folder, num_threads=1, home=home, format="int8")
    assert caplog.text.count("which no process used") == 2


def test_a_load_that_fails_leaves_no_file(tmp_path: Path, shared: Path) -> None:
    tensors = random_tensors(mixtral_config())
    tensors["model.layers.1.block_sparse_moe.experts.5.w2.weight"][7, 3] = float("nan")
    folder = write_checkpoint(tmp_path / "model", mixtral_config(), tensors=tensors)
    with pytest.raises(Exception, match="NaN"):
        load(folder, num_threads=1, home=Home(shared_in=shared))


def test_memory_counts_only_what_is_not_there_yet(tmp_path: Path, shared: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", mixtral_config())
    home = Home(shared_in=shared)
    with pytest.raises(HostMemoryShort, match=r"needs .* of memory"):
        load(folder, num_threads=1, home=home, available_bytes=3 * HUGE_BYTES)
    keep = load(folder, num_threads=1, home=home, available_bytes=4 * HUGE_BYTES)
    assert logits_of(load(folder, num_threads=1, home=home, available_bytes=HUGE_BYTES)) is not None
    assert keep.store is not None


def test_a_folder_that_is_too_small_is_refused_with_both_numbers(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / "model", mixtral_config())
    small = SimpleNamespace(f_bavail=256, f_frsize=4096, f_blocks=16384)
    monkeypatch.setattr(home_module.os, "statvfs", lambda path: small)
    message = (
        rf"{shared} has 1\.05 MB free of 67\.1 MB, and weights that are shared need 6\.29 MB there: "
        r"enlarge it \(as root, mount -o remount,size=\.\.\. .*; docker run --shm-size=\.\.\.\)"
    )
    with pytest.raises(HostMemoryShort, match=message):
        load(folder, num_threads=1, home=Home(shared_in=shared))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", mixtral_config())
    with pytest.raises(ConfigError, match=r"absent cannot be read \(No such file .*mount a tmpfs on it"):
        load(folder, num_threads=1, home=Home(shared_in=tmp_path / "absent"))


# ---- spread ----


def test_weights_are_spread_over_nodes_and_that_is_said_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path, mixtral_config())
    bound: list[tuple[int, ...]] = []

    def bind(data: Any, node_ids: Sequence[int]) -> None:
        if not bound:
            assert "weights by NUMA node" in caplog.text
        bound.append(tuple(node_ids))

    nodes = tuple(Node(node_id=i, available_bytes=GB) for i in (0, 2))
    with caplog.at_level(logging.INFO, logger="moesaic"):
        model = load(folder, num_threads=1, home=Home(nodes=nodes, bind=bind))
    # Two layers of experts, half of them on each node; the rest takes turns.
    assert bound == [(0,), (2,), (0,), (2,), (0, 2)]
    assert re.search(r"5\.24 MB on node 0, which has 1\.00 GB; 5\.24 MB on node 2", caplog.text)
    assert torch.equal(logits_of(model), logits_of(load(folder, num_threads=1)))


def test_a_node_with_too_little_memory_is_named_with_the_arithmetic(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, mixtral_config())
    nodes = (Node(node_id=0, available_bytes=GB), Node(node_id=1, available_bytes=5_000_000))
    message = (
        r"spread over 2 NUMA nodes, needs 5\.24 MB on node 1, which has 5\.00 MB available "
        r"\(4\.19 MB of experts, 1\.05 MB of the rest\): .*--numa off"
    )
    with pytest.raises(HostMemoryShort, match=message):
        load(folder, num_threads=1, home=Home(nodes=nodes))


def test_a_system_that_binds_nothing_is_told(tmp_path: Path) -> None:
    def bind(data: Any, node_ids: Sequence[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    folder = write_checkpoint(tmp_path, mixtral_config())
    nodes = tuple(Node(node_id=i, available_bytes=GB) for i in range(2))
    model = load(folder, num_threads=1, home=Home(nodes=nodes, bind=bind))
    assert "Operation not permitted" in model.lacks[0]
    assert torch.equal(logits_of(model), logits_of(load(folder, num_threads=1)))


def test_shared_weights_are_spread_by_whoever_puts_them_there(tmp_path: Path, shared: Path) -> None:
    bound: list[tuple[int, ...]] = []
    nodes = tuple(Node(node_id=i, available_bytes=GB) for i in range(2))
    home = Home(nodes=nodes, shared_in=shared, bind=lambda data, node_ids: bound.append(tuple(node_ids)))
    folder = write_checkpoint(tmp_path / "model", mixtral_config())
    first = load(folder, num_threads=1, home=home)
    assert bound == [(0,), (1,), (0,), (1,), (0, 1)]
    second = load(folder, num_threads=1, home=home)
    assert len(bound) == 5
    assert torch.equal(logits_of(first), logits_of(second))
