"""The ranks of a deployment in one epoch: who I am and who the others are; the only place that makes groups.

A mesh is never edited: when a rank is lost or joins, a new one with the next epoch takes its place.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from moesaic.errors import ConfigError, PeerLost

START_TIMEOUT_S = 120.0  # guess: the slowest rank has imported torch by then
ANSWER_S = 2.0  # guess: how long survivors of a failure wait for each other to say so
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What ranks must agree on before they exchange a byte."""

    version: str
    checkpoint: str
    numerics: str
    backend: str
    layout: str = ""  # and which rank holds which experts

    def differences(self, other: Identity) -> list[str]:
        """Each field that differs, with both values."""
        return [
            f"{name} {getattr(self, name)} and {getattr(other, name)}"
            for name in self.__slots__
            if getattr(self, name) != getattr(other, name)
        ]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mesh:
    """Ranks 0 to num_ranks - 1 over one store; `address` is where the others reach this one.

    Owns:    its groups, until `close`. Nothing of it is global: a process may be in several meshes.
    """

    rank: int
    num_ranks: int
    epoch: int
    store: dist.Store
    address: str
    timeout_s: float
    first_rank: int = 0  # of the run that this mesh is a part of
    _groups: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def join(
        cls,
        *,
        rank: int,
        num_ranks: int,
        store: dist.Store,
        address: str = "127.0.0.1",
        epoch: int = 0,
        timeout_s: float = START_TIMEOUT_S,
    ) -> Mesh:
        """Meet all other ranks.

        Raises: ConfigError for a rank beyond num_ranks; PeerLost naming a rank that did not come.
        """
        if not 0 <= rank < num_ranks:
            raise ConfigError(f"rank must be in 0 to {num_ranks - 1}, got {rank}")
        prefixed = dist.PrefixStore(f"epoch{epoch}", store)
        mesh = cls(
            rank=rank, num_ranks=num_ranks, epoch=epoch, store=prefixed, address=address, timeout_s=timeout_s
        )
        mesh.meet("join", timeout_s)
        return mesh

    def group(self, name: str) -> Any:
        """The group of all ranks for one use, gloo for tensors on the CPU; made on first use.

        Its sockets are at `address`: by itself gloo would take what the host's name stands for, which need
        not be the network that the ranks share.
        """
        if name not in self._groups:
            gloo: Any = dist.ProcessGroupGloo  # torch's stubs know little of it
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=self.address)]
            options._timeout = timedelta(seconds=self.timeout_s)
            store = dist.PrefixStore(f"group {name}", self.store)
            self._groups[name] = gloo(store, self.rank, self.num_ranks, options)
        return self._groups[name]

    def part(self, size: int) -> Mesh:
        """The mesh of this rank's `size` neighbours: ranks 0 to size - 1, size to 2 size - 1, and so on."""
        assert self.num_ranks % size == 0, f"{self.num_ranks} ranks are no parts of {size}"
        first = self.rank // size * size
        return Mesh(
            rank=self.rank - first,
            num_ranks=size,
            epoch=self.epoch,
            store=dist.PrefixStore(f"part {first} of {size}", self.store),
            address=self.address,
            timeout_s=self.timeout_s,
            first_rank=self.first_rank + first,
        )

    def agree(self, mine: Identity) -> None:
        """Refuse ranks that would not compute the same.

        Raises: ConfigError naming two ranks and what differs between them.
        """
        told = self.meet("agree", self.timeout_s, json.dumps(asdict(mine)))
        everyone = [Identity(**json.loads(one)) for one in told]
        for rank, other in enumerate(everyone):
            if differences := everyone[0].differences(other):
                raise ConfigError(
                    f"ranks 0 and {rank} differ in {'; '.join(differences)}; start all with the same "
                    "moesaic, checkpoint, options and CPU level (MOESAIC_CPU_LEVEL sets one for all)"
                )

    def missing(self, what: str, timeout_s: float = ANSWER_S) -> int | None:
        """After a failure: the lowest rank that does not say in time that it is here; None: all do."""
        try:
            self.meet(f"after {what}", timeout_s)
        except PeerLost as lost:
            return self.first_rank + lost.rank
        except RuntimeError:  # the store itself is gone, and it lives in the controller
            return None
        return None

    def close(self) -> None:
        """Leave; others are not waited for."""
        for group in self._groups.values():
            group.shutdown()
        self._groups.clear()

    def meet(self, what: str, timeout_s: float = START_TIMEOUT_S, word: str = "here") -> list[str]:
        """Return when all ranks have called this, with the word of each.

        Raises: PeerLost naming the lowest rank that has not within `timeout_s`.
        """
        self.store.set(f"{what}/{self.rank}", word)
        end_s = time.monotonic() + timeout_s
        for rank in range(self.num_ranks):
            while not self.store.check([f"{what}/{rank}"]):
                if time.monotonic() > end_s:
                    raise PeerLost(rank=rank, layer_idx=-1, stage="join", seconds=timeout_s)
                time.sleep(_POLL_S)
        return [self.store.get(f"{what}/{rank}").decode() for rank in range(self.num_ranks)]
