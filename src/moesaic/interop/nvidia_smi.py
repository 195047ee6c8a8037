"""The matrix that `nvidia-smi topo -m` prints, as a topology."""

from __future__ import annotations

import re

from moesaic.errors import ConfigError
from moesaic.spec.topology import Topology

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_DEVICE = re.compile(r"GPU\d+|NIC\d+|(?:mlx|bnxt|irdma|efa|hfi|qedr|rdmap?)\w*")
_NAMED = re.compile(r"^\s*(NIC\d+)\s*:\s*(\S+)", re.MULTILINE)


def is_matrix(text: str) -> bool:
    """Whether a text looks like such a matrix: a header and a row of GPU0."""
    plain = _ESCAPE.sub("", text)
    return bool(re.search(r"^\s*GPU0\b.*$", plain, re.MULTILINE)) and bool(
        re.search(r"^\s*GPU0\s+X\b", plain, re.MULTILINE)
    )


def read_matrix(text: str, *, name: str = "nvidia-smi topo -m") -> Topology:
    """The topology of a matrix. `name` is what messages call the text.

    Raises: ConfigError for a text without a matrix, a row that is cut, and links that are none.
    """
    plain = _ESCAPE.sub("", text)
    lines = [line for line in plain.splitlines() if line.strip()]
    start = next((i for i, line in enumerate(lines) if re.match(r"\s*GPU0\b(?!\s+X\b)", line)), None)
    if start is None:
        raise ConfigError(f"{name}: no header line with GPU0; give the whole output of nvidia-smi topo -m")
    columns = [word for word in lines[start].split() if _DEVICE.fullmatch(word)]
    rows: dict[str, list[str]] = {}
    for line in lines[start + 1 :]:
        first, *words = line.split()
        if first in columns and first not in rows:
            rows[first] = words
    missing = [device for device in columns if device not in rows]
    if missing:
        raise ConfigError(
            f"{name}: {missing[0]} has a column and no row: the text is cut; give the whole of it"
        )
    gpus = [device for device in columns if device.startswith("GPU")]
    nics = [device for device in columns if not device.startswith("GPU")]
    order = [columns.index(device) for device in (*gpus, *nics)]
    links = []
    for device in (*gpus, *nics):
        words = rows[device]
        if len(words) < len(columns):
            raise ConfigError(
                f"{name}: the row of {device} has {len(words)} links for {len(columns)} columns: the "
                "text is cut"
            )
        links.append(tuple(words[column] for column in order))
    named = dict(_NAMED.findall(plain))
    rest = [_affinity(rows[gpu][len(columns) :]) for gpu in gpus]
    return Topology(
        gpus=tuple(gpus), nics=tuple(nics),
        nic_names=tuple(named.get(nic, nic) for nic in nics) if named or nics else (),
        links=tuple(links), cpus=tuple(cpus for cpus, _ in rest), numa=tuple(node for _, node in rest),
    )  # fmt: skip


def _affinity(words: list[str]) -> tuple[str, int | None]:
    """Processors and NUMA node from what follows the links; N/A and an empty column are None."""
    cpus = words[0] if words and re.fullmatch(r"[\d,-]+", words[0]) else ""
    node = words[1] if len(words) > 1 and cpus else ""
    return cpus, int(node) if node.isdigit() else None
