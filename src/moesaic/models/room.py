"""Places for the weights outside the experts. Knows shapes and formats, not which weights there are."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from moesaic.errors import HostMemoryShort
from moesaic.experts.blob import ALIGNMENT_BYTES
from moesaic.kernels.formats import torch_dtype
from moesaic.kernels.panel import PANEL_ROWS, PanelWeight, Weight
from moesaic.kernels.weight_memory import WeightMemory
from moesaic.spec.numerics import Format
from moesaic.spec.quantised import QUANTISED
from moesaic.units import format_bytes


class Room:
    """Memory for all that is no expert, one parameter after the other in huge pages.

    Owns:    what it gave out keeps the memory alive, a chunk as long as any parameter in it.
    """

    CHUNK_BYTES = 64 * 2**20  # mapped at once: the end of each that stays unused costs no memory

    def __init__(self, memory: WeightMemory, chunk_bytes: int | None = None) -> None:
        """`chunk_bytes` is all that will be taken, where that has to come at once."""
        self.memory = memory
        self._chunk_bytes = chunk_bytes or self.CHUNK_BYTES
        self._free = torch.empty(0, dtype=torch.uint8)

    def place(self, shape: tuple[int, ...], format: Format) -> Weight:
        """Where a parameter goes, to be filled.

        Raises: HostMemoryShort when the machine refuses.
        """
        if format in QUANTISED:
            num_rows, width = shape
            num_panels, panel_bytes = -(-num_rows // PANEL_ROWS), QUANTISED[format].panel_bytes(width)
            data = self._take(num_panels * panel_bytes).view(num_panels, panel_bytes)
            return PanelWeight(format=format, data=data, num_rows=num_rows, width=width)
        dtype = torch_dtype(format)
        return self._take(prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def _take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, from a cache line on."""
        taken = in_lines(num_bytes)
        if taken > len(self._free):
            try:
                self._free = torch.from_numpy(self.memory.take(max(taken, self._chunk_bytes)))
            except OSError as error:
                raise HostMemoryShort(
                    f"a weight needs {format_bytes(num_bytes)} of memory and the machine refused "
                    f"({error.strerror}); use a machine with more memory or a smaller model"
                ) from error
        room, self._free = self._free[:num_bytes], self._free[taken:]
        return room


def in_lines(num_bytes: int) -> int:
    """Rounded up to whole cache lines, as `Room` gives it."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
