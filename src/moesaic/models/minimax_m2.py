"""MiniMax-M2: Mixtral's names, norms over all heads of queries and keys, a selection bias beside the gate."""

from __future__ import annotations

from moesaic.models.names import GQA, NORMS, ROTARY_BUFFERS, STACKED, W123, WeightMap

MINIMAX_M2 = WeightMap(
    layers={
        "norm": NORMS,
        "mixer": GQA,
        "router": {
            "weight": ("block_sparse_moe.gate.weight", "mlp.gate.weight"),
            "selection_bias": (
                "block_sparse_moe.e_score_correction_bias",
                "mlp.e_score_correction_bias",
            ),
        },
    },
    experts=(W123, STACKED),
    unused=(ROTARY_BUFFERS,),
)
