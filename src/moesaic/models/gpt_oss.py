"""gpt-oss: a sink per head, biases everywhere; experts stacked with gate and up in turn, plain or MXFP4."""

from __future__ import annotations

from moesaic.models.names import GQA, NORMS, ROTARY_BUFFERS, Stacked, WeightMap

_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"

GPT_OSS = WeightMap(
    layers={
        "norm": NORMS,
        "mixer": {**GQA, "sinks": "self_attn.sinks"},
        "router": {"weight": "mlp.router.weight", "logit_bias": "mlp.router.bias"},
    },
    experts=(
        Stacked(gate_up=_GATE_UP, down=_DOWN, is_interleaved=True, packed="mxfp4"),
        Stacked(gate_up=_GATE_UP, down=_DOWN, is_interleaved=True, is_transposed=True),
    ),
    unused=(ROTARY_BUFFERS,),
)
