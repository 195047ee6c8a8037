"""Experts in slots as arrays: copies, loads of GPUs, shared ranks, moves. Every policy makes one of these.

Ids are logical experts, or parts of them where a policy cut experts into slices (`expert * num_slices +
slice`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.spec.experts import FloatArray, IntArray

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Placement:
    """Which expert each slot of each GPU holds.

    Shapes:  ids_LGC [layers, GPUs, slots of a GPU] int64. L, G and C are layers, GPUs and slots in this room.
    """

    ids_LGC: IntArray
    num_slices: int = 1  # parts that each expert is cut into; a token needs them all

    def weights(self, load_LE: FloatArray) -> FloatArray:
        """Load by id: a slice does its part of its expert's work.

        Shapes:  load_LE [..., E]; returns [..., E * num_slices].
        """
        return np.repeat(load_LE / self.num_slices, self.num_slices, axis=-1)

    def gpu_load(self, load_LE: FloatArray) -> FloatArray:
        """Load of each GPU when the copies of an expert share its tokens evenly.

        Shapes:  load_LE [L, E]; returns [L, G].
        """
        return gpu_load(self.weights(load_LE), self.ids_LGC)

    def num_same_rank(self) -> int:
        """Copies that add nothing, because their GPU has another of the same expert; over all layers."""
        ids = np.sort(self.ids_LGC, axis=2)
        return int((ids[:, :, 1:] == ids[:, :, :-1]).sum())


def copies(ids_LGC: IntArray, num_ids: int) -> IntArray:
    """How many slots hold each id.

    Shapes:  returns [L, num_ids].
    """
    layers = len(ids_LGC)
    flat = ids_LGC.reshape(layers, -1) + np.arange(layers)[:, None] * num_ids
    return np.bincount(flat.ravel(), minlength=layers * num_ids).reshape(layers, num_ids)


def gpu_load(weights_LE: FloatArray, ids_LGC: IntArray) -> FloatArray:
    """Load of each GPU, copies sharing evenly.

    Shapes:  returns [L, G] float64.
    """
    layers = len(ids_LGC)
    each = weights_LE / np.maximum(copies(ids_LGC, weights_LE.shape[1]), 1)
    loads: FloatArray = (
        np.take_along_axis(each, ids_LGC.reshape(layers, -1), 1).reshape(ids_LGC.shape).sum(axis=2)
    )
    return loads


def balancedness(load_LG: FloatArray) -> FloatArray:
    """Mean over maximum of the GPUs' loads, per layer: 1 is even, 1 / GPUs the worst.

    Shapes:  returns [L]; a layer without load is 1.
    """
    most = load_LG.max(axis=-1)
    found: FloatArray = np.where(most > 0, load_LG.mean(axis=-1) / np.where(most > 0, most, 1.0), 1.0)
    return found


def held(ids_LGC: IntArray, num_ids: int) -> BoolArray:
    """Whether a GPU holds an id.

    Shapes:  returns [L, G, num_ids] bool.
    """
    layers, gpus, _ = ids_LGC.shape
    found = np.zeros((layers, gpus, num_ids), dtype=np.bool_)
    np.put_along_axis(found, ids_LGC, True, axis=2)
    return found


def num_moves(before_LGC: IntArray, after_LGC: IntArray) -> IntArray:
    """Experts that each layer's GPUs must fetch: held after and not before; a second copy on a GPU is free.

    Shapes:  returns [L]; the slots of a GPU may differ in number.
    """
    num_ids = 1 + int(max(before_LGC.max(), after_LGC.max()))
    found: IntArray = (held(after_LGC, num_ids) & ~held(before_LGC, num_ids)).sum(axis=(1, 2))
    return found


def received(weights_LE: FloatArray, ids_LGC: IntArray, top_k: int) -> FloatArray:
    """Tokens that each GPU is sent, each once however many of its experts it chose; as a share of all tokens.

    Experts are taken to be chosen independently: counts do not say more.

    Shapes:  returns [L, G].
    """
    layers = len(ids_LGC)
    chance = np.minimum(weights_LE / weights_LE.sum(axis=1, keepdims=True) * top_k, 1.0)
    each = chance / np.maximum(copies(ids_LGC, weights_LE.shape[1]), 1)
    missed = 1.0 - np.take_along_axis(each, ids_LGC.reshape(layers, -1), 1).reshape(ids_LGC.shape)
    found: FloatArray = 1.0 - missed.prod(axis=2)
    return found
