"""Which layouts this engine runs, and how they are said in a line."""

from __future__ import annotations

from moesaic.errors import ConfigError
from moesaic.spec.deployment import Grid, Layout
from moesaic.spec.model import ModelSpec


def data_parallel(num_ranks: int) -> Layout:
    """Attention on every rank for its own requests, experts spread over all ranks."""
    ranks = tuple(range(num_ranks))
    return Layout(
        attention=Grid(axes={"dp": num_ranks}, ranks=ranks),
        experts=Grid(axes={"ep": num_ranks}, ranks=ranks),
        dispatcher="local" if num_ranks == 1 else "exchange",
    )


def check_layout(layout: Layout, spec: ModelSpec) -> None:
    """Whether the model can be laid out so.

    Raises: ConfigError with the numbers and the nearest layouts that can.
    """
    fewest = min((moe.num_experts for _, moe in spec.moe_layers), default=1)
    if layout.num_ranks > fewest:
        raise ConfigError(
            f"{layout.num_ranks} ranks for {fewest} experts a layer: some would hold none; use at most "
            f"{fewest} ranks"
        )


def describe_layout(layout: Layout) -> str:
    """`attention dp 4, experts ep 4, exchange`."""
    parts = []
    for name, grid in (("attention", layout.attention), ("experts", layout.experts)):
        axes = " ".join(f"{axis} {size}" for axis, size in grid.axes.items() if size > 1) or "on one rank"
        parts.append(f"{name} {axes}")
    return ", ".join([*parts, layout.dispatcher])
