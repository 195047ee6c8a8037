from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.errors import ConfigError
from moesaic.interop.nvidia_smi import is_matrix, read_matrix
from moesaic.spec.topology import Topology, from_json

SAMPLES = Path(__file__).parents[2] / "samples"


def read(name: str) -> Topology:
    return read_matrix((SAMPLES / f"{name}.txt").read_text(), name=name)


@pytest.mark.parametrize("name", ["h100x8", "pcie4", "bridge2"])
def test_round_trip_through_json(name):
    found = read(name)
    assert from_json(found.to_json()) == found
    assert is_matrix((SAMPLES / f"{name}.txt").read_text())


def test_nvswitch_node():
    found = read("h100x8")
    assert found.nvlink_groups == (found.gpus,)
    assert found.is_all_to_all
    assert found.numa_groups == ((0, found.gpus[:4]), (1, found.gpus[4:]))
    assert found.cpus[0] == "0-51,104-155"
    assert found.nearest_nics("GPU1") == (("NIC3",), "PXB")
    assert found.nic_names[3] == "mlx5_3"
    assert len({found.nearest_nics(gpu) for gpu in found.gpus}) == 8  # an adapter of its own for each


def test_node_without_nvlink():
    found = read("pcie4")
    assert found.nvlink_groups == (("GPU0",), ("GPU1",), ("GPU2",), ("GPU3",))
    assert not found.is_all_to_all
    assert found.links[0][:4] == ("X", "PIX", "SYS", "SYS")
    assert found.nearest_nics("GPU2") == (("mlx5_0",), "SYS")
    assert found.numa == (0, 0, 1, 1)


def test_bridged_pair_and_columns_that_are_empty():
    found = read("bridge2")
    assert found.nvlink_groups == (("GPU0", "GPU1"), ("GPU2",))
    assert found.numa == (0, None, None)
    assert found.cpus == ("0-15", "0-15", "")
    assert found.nearest_nics("GPU0") == ((), "none")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("GPU3    SYS", "#"), "GPU3 has a column and no row: the text is cut"),
        (lambda text: text.replace("GPU1    PIX      X ", "GPU1    SYS      X "), "the other way"),
        (lambda text: text.replace("PHB", "FAR"), "'FAR' is no link"),
        (lambda text: text.replace("SYS      X      PIX     SYS", "SYS"), "links for 5 columns"),
        (lambda text: "no matrix", "no header line with GPU0"),
    ],
)
def test_damaged_matrices_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        read_matrix(change((SAMPLES / "pcie4.txt").read_text()))


def test_json_is_checked_like_the_matrix():
    found = read("bridge2")
    with pytest.raises(ConfigError, match="did you mean gpus"):
        from_json(found.to_json().replace('"gpus"', '"gpu"'))
    with pytest.raises(ConfigError, match="not valid JSON"):
        from_json("{")
    with pytest.raises(ConfigError, match="numa must be one a GPU"):
        replace(found, numa=(0,))
    assert not is_matrix("GPU0 is hot")
