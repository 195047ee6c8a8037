from __future__ import annotations

from typing import Any

import pytest
import torch
from kv_cases import reference_ops
from mixer_cases import Runner, pools_of, randomise, run_whole
from torch import Tensor

from moesaic.errors import ConfigError, UnsupportedModelError
from moesaic.kernels.matmul import noise
from moesaic.kernels.ops import Ops
from moesaic.layers.attention import GqaAttention, PagedAttend
from moesaic.layers.rope import RopeTable
from moesaic.spec.model import GqaSpec, RopeSpec
from moesaic.spec.numerics import DType

EPS = 1e-5
NUM_TOKENS = 70
CHUNKS = (1, 30, 1, 1, 20, 17)
ROPE = RopeSpec(theta=1e4, dim=16)


def config_values(**changes: Any) -> dict[str, Any]:
    return {
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "attn_implementation": "eager",
        "num_hidden_layers": 1,
        **changes,
    }


def llama() -> tuple[Any, Any, GqaSpec]:
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama as hf

    config = LlamaConfig(**config_values(attention_bias=True))
    spec = GqaSpec(
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope=ROPE,
        softmax_scale=0.25,
        has_qkv_bias=True,
        has_out_bias=True,
    )
    return hf.LlamaAttention(config, 0), hf.LlamaRotaryEmbedding(config), spec


def qwen3() -> tuple[Any, Any, GqaSpec]:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe import modeling_qwen3_moe as hf

    config = Qwen3MoeConfig(**config_values())
    spec = GqaSpec(num_heads=4, num_kv_heads=2, head_dim=16, rope=ROPE, softmax_scale=0.25, qk_norm="head")
    return hf.Qwen3MoeAttention(config, 0), hf.Qwen3MoeRotaryEmbedding(config), spec


def olmoe() -> tuple[Any, Any, GqaSpec]:
    from transformers import OlmoeConfig
    from transformers.models.olmoe import modeling_olmoe as hf

    config = OlmoeConfig(**config_values(hidden_size=64, clip_qkv=1.5))
    spec = GqaSpec(
        num_heads=4, num_kv_heads=2, head_dim=16, rope=ROPE, softmax_scale=0.25, qk_norm="full", qkv_clip=1.5
    )
    return hf.OlmoeAttention(config, 0), hf.OlmoeRotaryEmbedding(config), spec


def gpt_oss() -> tuple[Any, Any, GqaSpec]:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss import modeling_gpt_oss as hf

    values = config_values(attention_bias=True, sliding_window=20, layer_types=["sliding_attention"])
    config = GptOssConfig(**values)
    spec = GqaSpec(
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope=ROPE,
        softmax_scale=0.25,
        has_qkv_bias=True,
        has_out_bias=True,
        has_sinks=True,
        window=20,
    )
    return hf.GptOssAttention(config, 0), hf.GptOssRotaryEmbedding(config), spec


def our_weights(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our names for those of transformers."""
    found = {}
    for name, parameter in parameters.items():
        name = name.replace("_proj", "").replace(".weight", "").replace(".bias", "_bias")
        found[name] = parameter.detach()
    return found


def build(spec: GqaSpec, weights: dict[str, Tensor], ops: Ops) -> GqaAttention:
    rope = None if spec.rope is None else RopeTable(spec.rope, 1000)
    attend = PagedAttend.of(spec, ops, weights.get("sinks"))
    return GqaAttention(spec, weights, ops, rope, attend, norm_eps=EPS)


@pytest.mark.parametrize("family", [llama, qwen3, olmoe, gpt_oss])
def test_equals_transformers_and_chunks_equal_the_whole(family: Any) -> None:
    module, rotary, spec = family()
    weights = our_weights(randomise(module))
    x_TD = noise((NUM_TOKENS, module.config.hidden_size))
    runner = Runner(build(spec, weights, reference_ops()), pools_of(2, 16, 16))
    whole = runner.run(x_TD, [NUM_TOKENS])
    expected = run_whole(module.eval(), rotary, x_TD, window=spec.window)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(runner.run(x_TD, CHUNKS), whole)


def some_spec(**changes: Any) -> GqaSpec:
    values = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "rope": ROPE, "softmax_scale": 0.25}
    return GqaSpec(**{**values, **changes})


def some_weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    shapes = {"q": (64, 48), "k": (32, 48), "v": (32, 48), "o": (48, 64)}
    return {name: noise(shape, dtype, seed=i) for i, (name, shape) in enumerate(shapes.items())}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_rope_and_in_both_dtypes(dtype: DType) -> None:
    torch_dtype = getattr(torch, dtype)
    mixer = build(some_spec(rope=None), some_weights(torch_dtype), reference_ops(dtype))
    runner = Runner(mixer, pools_of(2, 16, 16, dtype=torch_dtype))
    x_TD = noise((NUM_TOKENS, 48), torch_dtype)
    whole = runner.run(x_TD, [NUM_TOKENS])
    assert whole.dtype == torch_dtype
    assert torch.equal(runner.run(x_TD, CHUNKS), whole)


def test_bits_follow_the_rotation() -> None:
    """The negative control: positions shifted by one give other bits."""
    x_TD, bits = noise((20, 48)), []
    for theta in (1e4, 2e4):
        mixer = build(some_spec(rope=RopeSpec(theta=theta, dim=16)), some_weights(), reference_ops())
        bits.append(Runner(mixer, pools_of(2, 16, 16)).run(x_TD, [20]))
    assert not torch.equal(*bits)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kv_from": 0}, "another layer"),
        ({"num_kv_heads": 3}, "num_kv_heads = 3 must divide num_heads = 4"),
    ],
)
def test_what_is_not_run_is_refused_by_name(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedModelError, match=text):
        build(some_spec(**changes), some_weights(), reference_ops())


def test_weights_must_be_those_of_the_spec() -> None:
    weights, ops = some_weights(), reference_ops()
    with pytest.raises(ConfigError, match="needs the weight 'q_bias'; given: k, o, q, v"):
        build(some_spec(has_qkv_bias=True), weights, ops)
    with pytest.raises(ConfigError, match=r"'k' has shape \[32, 48\], its spec says \[64, 48\]"):
        build(some_spec(num_kv_heads=4), weights, ops)
    with pytest.raises(ConfigError, match="no use for the weights sinks"):
        build(some_spec(), weights | {"sinks": torch.zeros(4)}, ops)
