"""The slots that experts are placed in: GPUs, slots of each, nodes, groups of experts; which numbers go."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotGrid:
    """GPUs with the same number of slots each; GPUs in order fill the nodes, node by node."""

    num_experts: int
    num_gpus: int
    num_slots: int  # physical experts over all GPUs
    num_nodes: int = 1
    num_groups: int = 1  # of experts: a token's experts come from few of them; only hierarchical EPLB asks

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_gpus", "num_slots", "num_nodes", "num_groups"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        legal = round_slots(self.num_slots, self.num_experts, self.num_gpus)
        if self.num_slots < self.num_experts:
            raise ConfigError(
                f"{self.num_slots} slots are fewer than the {self.num_experts} experts, and every expert "
                "needs "
                f"one; the nearest legal number for {self.num_gpus} GPUs is {legal}, and --round takes it"
            )
        if self.num_slots % self.num_gpus:
            below = self.num_slots - self.num_slots % self.num_gpus
            choices = f"{below} and {legal}" if below >= self.num_experts else str(legal)
            raise ConfigError(
                f"{self.num_slots} slots on {self.num_gpus} GPUs: {self.num_slots} mod {self.num_gpus} = "
                f"{self.num_slots % self.num_gpus}; the nearest legal numbers are {choices}, and --round "
                "takes "
                f"{legal}"
            )
        if self.num_slots > self.num_experts * self.num_gpus:
            raise ConfigError(
                f"{self.num_slots} slots are more than every GPU holding each of the {self.num_experts} "
                "experts "
                f"({self.num_experts * self.num_gpus}); give fewer"
            )
        if self.num_gpus % self.num_nodes:
            raise ConfigError(
                f"{self.num_gpus} GPUs on {self.num_nodes} nodes: {self.num_gpus} mod {self.num_nodes} = "
                f"{self.num_gpus % self.num_nodes}; the nearest legal numbers of nodes are "
                f"{divisors_near(self.num_gpus, self.num_nodes)}"
            )
        if self.num_experts % self.num_groups:
            raise ConfigError(
                f"{self.num_experts} experts in {self.num_groups} groups: {self.num_experts} mod "
                f"{self.num_groups} = {self.num_experts % self.num_groups}; the nearest legal numbers of "
                "groups "
                f"are {divisors_near(self.num_experts, self.num_groups)}"
            )

    @property
    def slots_per_gpu(self) -> int:
        """Slots of one GPU."""
        return self.num_slots // self.num_gpus

    @property
    def num_redundant(self) -> int:
        """Slots beyond one for each expert."""
        return self.num_slots - self.num_experts

    @property
    def gpus_per_node(self) -> int:
        """GPUs of one node."""
        return self.num_gpus // self.num_nodes


def round_slots(num_slots: int, num_experts: int, num_gpus: int) -> int:
    """The smallest number of slots, from num_slots up, that holds every expert and that GPUs share evenly."""
    return -(-max(num_slots, num_experts) // num_gpus) * num_gpus


def divisors_near(total: int, wanted: int) -> str:
    """The nearest divisors of `total` on both sides of `wanted`."""
    below = max(n for n in range(1, min(wanted, total) + 1) if total % n == 0)
    above = next((n for n in range(wanted, total + 1) if total % n == 0), None)
    return str(below) if above is None else f"{below} and {above}"
