"""How often two experts are chosen together, from a JSON file.

{"pairs": [{"layers": [0, 7], "counts": [[...], ...]}]}: rows are experts of the first layer, columns of the
second, which is the same or a deeper one; layers as the load names them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moesaic.errors import ConfigError
from moesaic.interop.dump import Dump, read_json
from moesaic.placement.coactivation import Pairs
from moesaic.spec.experts import FloatArray


def read_pairs(path: Path, dump: Dump) -> Pairs:
    """Counts by positions of sparse layers.

    Raises: ConfigError for another shape than the load's experts, a layer that the load does not have, and
            negative or not finite counts.
    """
    data = read_json(path)
    entries = data.get("pairs") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            f'{path}: no pairs: it must be {{"pairs": [{{"layers": [a, b], "counts": [[...]]}}]}}'
        )
    place = {layer: row for row, layer in enumerate(dump.sparse_layers)}
    found: dict[tuple[int, int], FloatArray] = {}
    for number, entry in enumerate(entries):
        layers = entry.get("layers") if isinstance(entry, dict) else None
        if not isinstance(layers, list) or len(layers) != 2 or any(layer not in place for layer in layers):
            raise ConfigError(
                f"{path}: pairs[{number}].layers is {layers!r}; two sparse layers of {dump.source} are needed"
            )
        first, second = (place[layer] for layer in layers)
        if first > second:
            raise ConfigError(
                f"{path}: pairs[{number}].layers is {layers}: the first must not be the deeper one"
            )
        try:
            counts = np.asarray(entry.get("counts"), dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}: pairs[{number}].counts must be rows of numbers: {error}") from error
        if counts.shape != (dump.num_experts,) * 2 or not np.isfinite(counts).all() or counts.min() < 0:
            raise ConfigError(
                f"{path}: pairs[{number}].counts must be {dump.num_experts} x {dump.num_experts} counts "
                "of at least 0, "
                f"got the shape {list(counts.shape)}"
            )
        found[first, second] = counts
    return found
