"""OLMoE: norms over all heads of queries and keys at once, clipped projections; every layer is sparse."""

from __future__ import annotations

from moesaic.models.names import GQA, NORMS, PER_EXPERT, ROTARY_BUFFERS, STACKED, WeightMap

OLMOE = WeightMap(
    layers={"norm": NORMS, "mixer": GQA, "router": {"weight": "mlp.gate.weight"}},
    experts=(PER_EXPERT, STACKED),
    unused=(ROTARY_BUFFERS,),
)
