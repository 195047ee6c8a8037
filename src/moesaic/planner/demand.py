"""What is asked of a deployment: traffic, objectives, and the devices on offer. No layout, no price of
one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from moesaic.errors import ConfigError
from moesaic.spec.hardware import Cluster

Objective = Literal["per-gpu", "per-price", "per-watt", "latency"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

SHORTEST_S, LONGEST_S = 1e-6, 1e6
"""Limits of what may be asked of a latency: below is less than a kernel takes, above is days."""
MAX_STRETCH = 32  # guess: times the model's positions beyond which a length is a slip of the keyboard

_FACT: dict[str, str] = {"per-price": "price", "per-watt": "power_w"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Traffic and what it must meet. None: not asked for.

    Units:  isl and osl are tokens of prompt and answer; concurrency is requests in flight over all devices.
    """

    isl: int
    osl: int
    tpot_s: float | None = None
    ttft_s: float | None = None
    concurrency: int | None = None
    objective: Objective = "per-gpu"
    prefix_hit: float = 0.0  # part of the prompt whose KV is there already

    def __post_init__(self) -> None:
        for name in ("isl", "osl", "concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if not 0.0 <= self.prefix_hit < 1.0:
            raise ConfigError(
                f"prefix hit is the cached share of a prompt, from 0 to below 1, got {self.prefix_hit}"
            )
        for name in ("tpot_s", "ttft_s"):
            value = getattr(self, name)
            if value is not None and not SHORTEST_S <= value <= LONGEST_S:
                raise ConfigError(
                    f"{name.removesuffix('_s')} must be above 0, between {SHORTEST_S * 1e3:g} and "
                    f"{LONGEST_S * 1e3:g} ms, got {value * 1e3:g} ms"
                )

    def without(self, names: tuple[str, ...]) -> Demand:
        """The same traffic with some objectives dropped, served as near to them as can be."""
        return Demand(
            isl=self.isl, osl=self.osl, tpot_s=None if "tpot_s" in names else self.tpot_s,
            ttft_s=None if "ttft_s" in names else self.ttft_s,
            concurrency=None if "concurrency" in names else self.concurrency,
            prefix_hit=self.prefix_hit, objective="per-gpu" if names == ("concurrency",) else "latency",
        )  # fmt: skip

    @property
    def traffic(self) -> tuple[int, int, float]:
        """What requests look like, whatever is asked of their times and number."""
        return self.isl, self.osl, self.prefix_hit

    @property
    def num_steps(self) -> int:
        """Decode steps of a request: none where the prompt's own step gives the only token."""
        return self.osl if self.osl > 1 else 0

    @property
    def new_tokens(self) -> int:
        """Tokens of a prompt that are computed."""
        return max(1, round(self.isl * (1.0 - self.prefix_hit)))

    @property
    def length(self) -> int:
        """Positions that a finished request keeps."""
        return self.isl + self.osl

    @property
    def mean_context(self) -> float:
        """Positions in the cache of a request half way through its answer."""
        return self.isl + self.osl / 2


def stretched(length: int, max_position: int) -> str | None:
    """What to know about requests of more positions than a model has; None when it has them.

    They are priced, since positions can be scaled (rope scaling) or a longer sibling meant, up to
    `MAX_STRETCH` times as many; engines refuse them without that.

    Raises: ConfigError for more.
    """
    if length <= max_position:
        return None
    if length > MAX_STRETCH * max_position:
        raise ConfigError(
            f"{length} positions are over {MAX_STRETCH} times the model's {max_position}; ask for at most "
            f"{MAX_STRETCH * max_position}"
        )
    return (
        f"{length} positions are beyond the model's {max_position}; priced as if it had them, engines refuse "
        "them unless its config scales the positions"
    )


def unit_cost(cluster: Cluster, objective: Objective) -> float:
    """What one device costs in the currency of an objective: 1, its price or its watts.

    Raises: ConfigError when the machine's file lacks the number.
    """
    name = _FACT.get(objective)
    if name is None:
        return 1.0
    machine = cluster.machine
    if name not in machine.facts:
        option = f"give --price {machine.name}=NUMBER or " if name == "price" else ""
        raise ConfigError(
            f"objective {objective} needs {name}, which machine {machine.name} does not have; {option}add it "
            f"with its "
            "source to the machine's file"
        )
    return machine.facts[name].value
