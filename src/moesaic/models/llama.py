"""Llama, dense. Biases, a tied head and rope scaling are facts of the spec; here are only the names."""

from __future__ import annotations

from moesaic.models.names import GQA, NORMS, ROTARY_BUFFERS, WeightMap, gated

LLAMA = WeightMap(
    layers={"norm": NORMS, "mixer": GQA, "dense": gated("mlp")},
    unused=(ROTARY_BUFFERS,),
)
