from __future__ import annotations

import pytest
from config_cases import CONFIGS

from moesaic.account.params import count_params, expert_params, mtp_params
from moesaic.spec.families import read_config
from moesaic.spec.locate import preset
from moesaic.spec.model import COMPONENTS, ModelSpec


def spec_of(name: str) -> ModelSpec:
    return read_config(preset(name).config, name=name)


PUBLISHED = {
    "deepseek-v3": ("671.03", "37.55"),
    "mixtral-8x22b": ("140.63", "39.16"),
    "mixtral-8x7b": ("46.70", "12.88"),
    "qwen3-235b-a22b": ("235.1", "22.2"),
    "dbrx": ("131.6", "36.5"),
    "kimi-k2": ("1026", "32.9"),
}
"""Billions of parameters, in all and per token, to the digits in which they are usually printed.

Source: the models' reports and cards; both embedding matrices and the routers count.
"""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals(name: str) -> None:
    params = count_params(spec_of(name))
    for count, printed in zip((params.num_total, params.num_active), PUBLISHED[name], strict=True):
        digits = len(printed.partition(".")[2])
        assert f"{count / 1e9:.{digits}f}" == printed


def test_without_the_input_embedding_deepseek_v3_is_the_smaller_number() -> None:
    active = count_params(spec_of("deepseek-v3")).active
    assert round((sum(active.values()) - active["embedding"]) / 1e9, 1) == 36.6


def test_exact_counts_of_released_models() -> None:
    """Sums over the shapes of the released tensors, counted from the reference modules."""
    for name, count in {
        "deepseek-v3": 671_026_419_200,
        "mixtral-8x7b": 46_702_792_704,
        "qwen3-30b-a3b": 30_532_122_624,
        "olmoe-1b-7b": 6_919_161_856,
        "gpt-oss-20b": 20_914_757_184,
        "gpt-oss-120b": 116_829_156_672,
        "llama-4-maverick": 400_711_848_960,
        "nemotron-3-nano": 31_577_940_288,
        "nemotron-3-super": 120_668_707_840,
        "qwen3.5-35b-a3b": 34_660_610_688,
        "qwen3-next-80b-a3b": 79_674_391_296,
        "glm-5.2": 743_377_019_904,
        "minimax-m2": 228_689_764_864,
        "dots.llm1": 142_774_381_696,
    }.items():
        assert count_params(spec_of(name)).num_total == count, name


def test_one_expert() -> None:
    assert expert_params(spec_of("qwen3-235b-a22b").moe_layers[0][1]) == 18_874_368


@pytest.mark.parametrize("name", CONFIGS)
def test_components_add_up(name: str) -> None:
    spec = read_config(CONFIGS[name], name=name)
    params = count_params(spec)
    assert set(params.total) == set(COMPONENTS)
    assert all(0 <= params.active[component] <= params.total[component] for component in COMPONENTS)
    idle = sum((moe.num_experts - moe.experts_per_token) * expert_params(moe) for _, moe in spec.moe_layers)
    assert params.num_total - params.num_active == idle


def test_a_tied_head_counts_once() -> None:
    free = read_config(CONFIGS["granitemoe"] | {"tie_word_embeddings": False}, name="free")
    tied = read_config(CONFIGS["granitemoe"], name="tied")
    assert count_params(free).num_total - count_params(tied).num_total == 100 * 64


def test_layers_that_predict_further_tokens_are_beside_the_total() -> None:
    spec = spec_of("deepseek-v3")
    assert round(mtp_params(spec) / 1e9, 1) == 11.6
    assert mtp_params(spec_of("mixtral-8x7b")) == 0
