from __future__ import annotations

import pytest
from config_cases import CONFIGS

from moesaic.account.memory import (
    devices_for_weights,
    expert_bytes,
    kv_footprint,
    largest_batch,
    weight_bytes,
)
from moesaic.account.params import count_params
from moesaic.errors import ConfigError
from moesaic.spec.families import read_config
from moesaic.spec.locate import preset
from moesaic.spec.model import ModelSpec

GB80 = 80_000_000_000


def spec_of(name: str) -> ModelSpec:
    return read_config(preset(name).config, name=name)


@pytest.mark.parametrize(
    ("name", "num_bytes"), [("mixtral-8x7b", 131_072), ("mixtral-8x22b", 229_376), ("deepseek-v3", 70_272)]
)
def test_kv_per_token(name: str, num_bytes: int) -> None:
    kv = kv_footprint(spec_of(name))
    assert kv.bytes_per_token == kv.bytes_per_token_inside == num_bytes
    assert kv_footprint(spec_of(name), "float32").bytes_per_token == 2 * num_bytes
    assert kv.sequence_bytes(1024) == 1024 * num_bytes


def test_windows_stop_growing() -> None:
    kv = kv_footprint(spec_of("gpt-oss-20b"))
    assert kv.bytes_per_token == 12 * 2 * 8 * 64 * 2
    assert kv.windows == ((128, 12 * 2 * 8 * 64 * 2),)
    assert kv.bytes_per_token_inside == 49_152
    assert kv.sequence_bytes(128) == 128 * 49_152
    assert kv.sequence_bytes(1128) - kv.sequence_bytes(128) == 1000 * 24_576


def test_states_do_not_grow() -> None:
    kv = kv_footprint(spec_of("qwen3.5-35b-a3b"))
    assert kv.bytes_per_token == 10 * 2 * 2 * 256 * 2
    # 30 layers: 32 heads of 128 x 128 in float32, and three rows of 8192 channels.
    assert kv.state_bytes == 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert kv.sequence_bytes(0) == kv.state_bytes


def test_an_index_keeps_keys_where_it_is_computed() -> None:
    plain, indexed, shared = (kv_footprint(spec_of(n)) for n in ("deepseek-v3", "deepseek-v3.2", "glm-5.2"))
    assert indexed.bytes_per_token - plain.bytes_per_token == 61 * 128 * 2
    assert shared.bytes_per_token == 78 * 576 * 2 + 21 * 128 * 2


def test_a_layer_that_reads_anothers_keys_keeps_none() -> None:
    kv = kv_footprint(read_config(CONFIGS["gemma4"], name="gemma4"))
    assert kv.bytes_per_token == 1 * 2 * 2 * 32 * 2
    assert kv.windows == ((512, 6 * 2 * 2 * 16 * 2),)


def test_devices_for_the_weights_of_deepseek_v3() -> None:
    spec = spec_of("deepseek-v3")
    assert devices_for_weights(sum(weight_bytes(spec, "bfloat16").values()), GB80) == 19
    assert devices_for_weights(sum(weight_bytes(spec, "fp8").values()), GB80) == 10
    assert devices_for_weights(sum(weight_bytes(spec).values()), GB80) == 10
    assert devices_for_weights(sum(weight_bytes(spec, "bfloat16").values()), GB80, usable=1.0) == 17
    for usable in (0.0, 1.1):
        with pytest.raises(ConfigError, match="usable share"):
            devices_for_weights(1, GB80, usable=usable)


def test_weights_as_they_are_stored() -> None:
    assert sum(weight_bytes(spec_of("mixtral-8x7b")).values()) == 2 * 46_702_792_704
    sizes = weight_bytes(spec_of("gpt-oss-20b"))
    # Matrices in 4.25 bits, biases in 16.
    weights, biases = 3 * 2880 * 2880, 3 * 2880
    assert sizes["routed_experts"] == 24 * 32 * (weights * 4.25 / 8 + biases * 2)
    assert (
        expert_bytes(spec_of("gpt-oss-20b"), spec_of("gpt-oss-20b").moe_layers[0][1])
        == weights * 4.25 / 8 + 17_280
    )
    # The released files have 13.76 GB.
    assert round(sum(sizes.values()) / 1e9, 2) == 13.76


def test_a_narrow_format_leaves_embeddings_and_router_alone() -> None:
    spec = spec_of("mixtral-8x7b")
    narrow, plain = weight_bytes(spec, "int4"), weight_bytes(spec)
    for component in ("embedding", "head", "router", "norms"):
        assert narrow[component] == plain[component]
    assert narrow["routed_experts"] == round(plain["routed_experts"] * 4.125 / 16)
    total = count_params(spec).num_total
    assert sum(weight_bytes(spec, "float32").values()) == 4 * total
    with pytest.raises(ConfigError, match="did you mean fp8"):
        weight_bytes(spec, "fp9")


def test_float16_is_counted_as_stored() -> None:
    half = read_config(CONFIGS["mixtral"] | {"torch_dtype": "float16"}, name="half")
    full = read_config(CONFIGS["mixtral"] | {"torch_dtype": "float32"}, name="full")
    assert 2 * sum(weight_bytes(half).values()) == sum(weight_bytes(full).values())


def test_largest_batch_of_mixtral_8x22b_on_eight_devices() -> None:
    spec = spec_of("mixtral-8x22b")
    weights = sum(weight_bytes(spec).values())
    found = {
        context: largest_batch(
            num_devices=8,
            memory_bytes=GB80,
            weights=weights,
            sequence_bytes=kv_footprint(spec).sequence_bytes(context),
        )
        for context in (1024, 2048)
    }
    assert found == {1024: 1254, 2048: 627}
    assert largest_batch(num_devices=1, memory_bytes=GB80, weights=weights, sequence_bytes=1) == 0
