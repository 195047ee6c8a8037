from __future__ import annotations

import pytest
from config_cases import CONFIGS

from moesaic.account.flops import context_flops, prefill_flops, token_flops
from moesaic.account.params import count_params
from moesaic.spec.families import read_config
from moesaic.spec.locate import preset
from moesaic.spec.model import ModelSpec


def spec_of(name: str) -> ModelSpec:
    return read_config(preset(name).config, name=name)


def test_a_token_costs_two_operations_per_active_weight_and_its_context() -> None:
    spec = spec_of("mixtral-8x7b")
    flops = token_flops(spec, 1000)
    active = count_params(spec).active
    assert sum(flops.matrices.values()) == 2 * (sum(active.values()) - active["embedding"] - active["norms"])
    assert flops.context == 32 * 4 * 32 * 128 * 1000  # layers, two products of two operations, heads, width
    assert flops.total == sum(flops.matrices.values()) + flops.context


def test_latent_attention_decodes_absorbed() -> None:
    assert token_flops(spec_of("deepseek-v3"), 1000).context == 61 * 2 * 128 * (512 + 64 + 512) * 1000


def test_a_sparse_index_bounds_what_is_attended_to() -> None:
    spec = spec_of("deepseek-v3.2")
    short, long, longer = (token_flops(spec, n).context for n in (2048, 4096, 8192))
    index = 61 * 2 * 64 * 128
    assert long - short == index * 2048
    assert longer - long == index * 4096


def test_a_window_bounds_its_layers() -> None:
    spec = spec_of("gpt-oss-20b")
    assert token_flops(spec, 1128).context - token_flops(spec, 128).context == 12 * 4 * 64 * 64 * 1000


def test_states_cost_the_same_anywhere() -> None:
    layer = read_config(CONFIGS["nemotron_h"], name="n").layers[0]
    assert context_flops(layer, 1) == context_flops(layer, 10_000) == 5 * 8 * 16 * 16


def test_a_tied_head_is_still_a_product() -> None:
    spec = read_config(CONFIGS["granitemoe"], name="g")
    assert token_flops(spec, 1).matrices["head"] == 2 * 100 * 64


def test_tables_of_embeddings_are_no_products() -> None:
    assert token_flops(read_config(CONFIGS["gemma4"], name="g"), 1).matrices["other"] == 0


@pytest.mark.parametrize(
    "name", ["gpt_oss", "deepseek_v32", "deepseek_v3", "qwen3_next", "llama4", "nemotron_h"]
)
@pytest.mark.parametrize("cached", [0, 5, 40])
def test_a_prefill_is_the_sum_of_its_tokens(name: str, cached: int) -> None:
    spec = read_config(CONFIGS[name], name=name)
    num_tokens = 50
    tokens = [token_flops(spec, cached + i + 1) for i in range(num_tokens)]
    head = tokens[0].matrices["head"]
    assert (
        prefill_flops(spec, num_tokens, cached=cached)
        == sum(t.total for t in tokens) - (num_tokens - 1) * head
    )
