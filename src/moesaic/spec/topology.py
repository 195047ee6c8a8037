"""How the GPUs and network adapters of one node are joined, kept as code: a value and its JSON.

What nvidia-smi prints is read in `interop`; what a link costs is in the machine files.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from moesaic.errors import ConfigError
from moesaic.spec.codec import from_plain, to_plain

LINKS = ("X", "PIX", "PXB", "PHB", "NODE", "SYS")
"""Nearest first: itself, one PCIe switch, several, the host bridge, within a NUMA node, between sockets."""
_NVLINK = re.compile(r"NV(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """One node. `links[i][j]` joins device i and j, GPUs first, then adapters: `NV18`, `PIX`, `SYS`, ..."""

    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    nic_names: tuple[str, ...]  # what the system calls each adapter; empty: not known
    links: tuple[tuple[str, ...], ...]
    cpus: tuple[str, ...]  # processors near each GPU, as `0-51,104-155`; empty: not known
    numa: tuple[int | None, ...]  # NUMA node of each GPU

    def __post_init__(self) -> None:
        names = self.devices
        if not self.gpus or len(set(names)) != len(names):
            raise ConfigError(f"a topology needs GPUs with different names, got {list(names)}")
        if len(self.links) != len(names) or any(len(row) != len(names) for row in self.links):
            raise ConfigError(f"links must be {len(names)} rows of {len(names)}: GPUs, then adapters")
        for i, row in enumerate(self.links):
            for j, link in enumerate(row):
                if link not in LINKS and not _NVLINK.fullmatch(link):
                    raise ConfigError(
                        f"{names[i]} to {names[j]}: {link!r} is no link; known: NV and a number, "
                        f"{', '.join(LINKS)}"
                    )
                if (link == "X") != (i == j) or link != self.links[j][i]:
                    raise ConfigError(
                        f"{names[i]} to {names[j]} is {link}, the other way {self.links[j][i]}: a "
                        "matrix of links "
                        "is symmetric, with X on its diagonal only"
                    )
        for label, values in (("cpus", self.cpus), ("numa", self.numa)):
            if len(values) != len(self.gpus):
                raise ConfigError(f"{label} must be one a GPU, {len(self.gpus)}, got {len(values)}")
        if len(self.nic_names) not in (0, len(self.nics)):
            raise ConfigError(f"nic_names must be none, or one an adapter, {len(self.nics)}")

    @property
    def devices(self) -> tuple[str, ...]:
        """GPUs, then adapters."""
        return (*self.gpus, *self.nics)

    @property
    def nvlink_groups(self) -> tuple[tuple[str, ...], ...]:
        """GPUs that reach each other over NVLink, directly or through others; without it, each alone."""
        left = list(range(len(self.gpus)))
        groups = []
        while left:
            group = [left.pop(0)]
            for gpu in group:
                joined = [other for other in left if _NVLINK.fullmatch(self.links[gpu][other])]
                group += joined
                left = [other for other in left if other not in joined]
            groups.append(tuple(self.gpus[gpu] for gpu in sorted(group)))
        return tuple(groups)

    @property
    def is_all_to_all(self) -> bool:
        """Whether every pair of GPUs has NVLink of its own, as behind NVSwitch."""
        return all(
            _NVLINK.fullmatch(self.links[i][j]) is not None
            for i in range(len(self.gpus))
            for j in range(len(self.gpus))
            if i != j
        )

    @property
    def numa_groups(self) -> tuple[tuple[int | None, tuple[str, ...]], ...]:
        """GPUs by NUMA node."""
        nodes = sorted({n for n in self.numa if n is not None}) + ([None] if None in self.numa else [])
        return tuple(
            (node, tuple(gpu for gpu, own in zip(self.gpus, self.numa, strict=True) if own == node))
            for node in nodes
        )

    def nearest_nics(self, gpu: str) -> tuple[tuple[str, ...], str]:
        """The adapters that a GPU reaches over the fewest bridges, and over which link; none without any."""
        row = self.links[self.gpus.index(gpu)][len(self.gpus) :]
        if not row:
            return (), "none"
        best = min(row, key=LINKS.index)
        return tuple(nic for nic, link in zip(self.nics, row, strict=True) if link == best), best

    def to_json(self) -> str:
        """The file: one JSON object."""
        return json.dumps(to_plain(self), indent=2) + "\n"


def from_json(text: str | bytes, *, name: str = "topology") -> Topology:
    """The topology that a file holds. `name` is what messages call the file.

    Raises: ConfigError for damaged JSON, an unknown or missing key, or a matrix that is none.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not valid JSON: {error}") from error
    return from_plain(Topology, data, where=name)
