from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kv_cases import reference_ops
from mixer_cases import Runner, pools_of, randomise, run_whole
from torch import Tensor

from moesaic.errors import ConfigError, UnsupportedModelError
from moesaic.kernels.matmul import noise
from moesaic.kernels.ops import Ops, choose
from moesaic.layers.attention import PagedAttend
from moesaic.layers.mla import MlaAttention
from moesaic.layers.rope import RopeTable
from moesaic.spec.model import IndexSpec, MlaSpec, RopeScaling, RopeSpec
from moesaic.spec.numerics import FormMap, preset

NUM_TOKENS = 70
CHUNKS = (1, 30, 1, 1, 20, 17)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
}
SCALING = RopeScaling(kind="yarn", factor=40.0, original_max_position=32, mscale=0.707, mscale_all_dim=0.9)
SPEC = MlaSpec(
    num_heads=3,
    q_lora_rank=None,
    kv_lora_rank=32,
    nope_dim=16,
    rope_dim=8,
    value_dim=12,
    rope=RopeSpec(theta=1e4, dim=8, is_interleaved=True, scaling=SCALING),
    softmax_scale=1.0,
)
NAMES = {
    "q_proj.weight": "q",
    "q_a_proj.weight": "q_a",
    "q_a_proj.bias": "q_a_bias",
    "q_a_layernorm.weight": "q_a_norm",
    "q_b_proj.weight": "q_b",
    "kv_a_proj_with_mqa.weight": "kv_a",
    "kv_a_proj_with_mqa.bias": "kv_a_bias",
    "kv_a_layernorm.weight": "kv_a_norm",
    "kv_b_proj.weight": "kv_b",
    "o_proj.weight": "o",
    "o_proj.bias": "o_bias",
}


def transformers_layer(version: int, q_lora_rank: int | None, has_bias: bool) -> tuple[Any, Any]:
    from transformers import DeepseekV2Config, DeepseekV3Config
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    values = {
        "hidden_size": 42,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": q_lora_rank,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "attention_bias": has_bias,
        "rope_parameters": YARN,
        "attn_implementation": "eager",
        "num_hidden_layers": 1,
    }
    if version == 2:
        config = DeepseekV2Config(**values)
        return v2.DeepseekV2Attention(config, 0), v2.DeepseekV2RotaryEmbedding(config)
    config = DeepseekV3Config(**values)
    return v3.DeepseekV3Attention(config, 0), v3.DeepseekV3RotaryEmbedding(config)


def build(spec: MlaSpec, weights: dict[str, Tensor], ops: Ops) -> MlaAttention:
    return MlaAttention(
        spec, weights, ops, RopeTable(spec.rope, 1000), PagedAttend.of(spec, ops), norm_eps=1e-6
    )


@pytest.mark.parametrize(("version", "rank", "has_bias"), [(2, None, False), (3, 24, False), (3, 24, True)])
def test_equals_transformers_and_chunks_equal_the_whole(
    version: int, rank: int | None, has_bias: bool
) -> None:
    module, rotary = transformers_layer(version, rank, has_bias)
    weights = {NAMES[name]: parameter.detach() for name, parameter in randomise(module).items()}
    spec = replace(SPEC, q_lora_rank=rank, has_bias=has_bias, softmax_scale=module.scaling)
    runner = Runner(build(spec, weights, reference_ops()), pools_of(1, 40))
    x_TD = noise((NUM_TOKENS, 42))
    whole = runner.run(x_TD, [NUM_TOKENS])
    torch.testing.assert_close(whole, run_whole(module.eval(), rotary, x_TD), rtol=1e-4, atol=1e-4)
    assert torch.equal(runner.run(x_TD, CHUNKS), whole)


def some_weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "q": (72, 42),
        "kv_a": (40, 42),
        "kv_a_norm": (32,),
        "kv_b": (84, 32),
        "o": (42, 36),
    }
    return {name: noise(shape, dtype, seed=i) for i, (name, shape) in enumerate(shapes.items())}


def test_bfloat16_keeps_the_promise() -> None:
    mixer = build(SPEC, some_weights(torch.bfloat16), reference_ops("bfloat16"))
    runner = Runner(mixer, pools_of(1, 40, dtype=torch.bfloat16))
    x_TD = noise((NUM_TOKENS, 42), torch.bfloat16)
    whole = runner.run(x_TD, [NUM_TOKENS])
    assert whole.dtype == torch.bfloat16
    assert torch.equal(runner.run(x_TD, CHUNKS), whole)


def test_what_is_not_run_is_refused_by_name() -> None:
    indexed = replace(SPEC, index=IndexSpec(num_heads=1, head_dim=8, top_k=4))
    with pytest.raises(UnsupportedModelError, match="sparse-attention index"):
        build(indexed, some_weights(), reference_ops())
    plain = replace(preset("portable", dtype="float32"), forms=FormMap(mla="plain"))
    with pytest.raises(UnsupportedModelError, match=r"forms\.mla is 'plain'"):
        build(SPEC, some_weights(), choose(plain, num_threads=1))


def test_weights_must_be_those_of_the_spec() -> None:
    with pytest.raises(ConfigError, match="needs the weight 'q_a'"):
        build(replace(SPEC, q_lora_rank=8), some_weights(), reference_ops())
    with pytest.raises(ConfigError, match="no use for the weights q_a"):
        build(SPEC, some_weights() | {"q_a": torch.zeros(1)}, reference_ops())
