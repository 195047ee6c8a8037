from __future__ import annotations

import numpy as np
import pytest
from config_cases import CONFIGS

from moesaic.account.memory import weight_bytes
from moesaic.account.traffic import (
    balance_point,
    dispatch_bytes_per_token,
    expected_distinct,
    expert_utilisation,
    rows_per_expert_to_balance,
    sparsity,
    step_traffic,
)
from moesaic.errors import ConfigError
from moesaic.spec.families import read_config
from moesaic.spec.hardware import machine
from moesaic.spec.locate import preset
from moesaic.spec.model import ModelSpec


def spec_of(name: str) -> ModelSpec:
    return read_config(preset(name).config, name=name)


@pytest.mark.parametrize(
    ("name", "ratio"), [("mixtral-8x7b", 4), ("qwen3-235b-a22b", 16), ("deepseek-v3", 32), ("kimi-k2", 48)]
)
def test_sparsity(name: str, ratio: int) -> None:
    assert sparsity(spec_of(name).moe_layers[0][1]) == ratio


def test_rows_an_expert_needs() -> None:
    assert rows_per_expert_to_balance(312e12, 2.0e12) == 156
    assert round(rows_per_expert_to_balance(0.7 * 989e12, 0.8 * 3.35e12)) == 258
    assert rows_per_expert_to_balance(312e12, 2.0e12, weight_bits=8) == 78
    assert (
        rows_per_expert_to_balance(312e12, 2.0e12) * sparsity(spec_of("qwen3-235b-a22b").moe_layers[0][1])
        == 2496
    )
    with pytest.raises(ConfigError, match="rates must be above zero"):
        rows_per_expert_to_balance(0, 1)


def test_balance_on_a_machine() -> None:
    found = balance_point(spec_of("qwen3-235b-a22b"), machine("h100"))
    assert found is not None
    assert found.compute_dtype == "bfloat16"
    assert round(found.rows) == 258
    assert found.batch == 4134  # 258.32 x 16, rounded up
    assert found.peak_batch == 4724
    assert balance_point(read_config(CONFIGS["llama"], name="l"), machine("h100")) is None


def test_narrow_weights_meet_narrow_rates_where_there_are_some() -> None:
    spec = spec_of("deepseek-v3")
    h100, a100 = balance_point(spec, machine("h100")), balance_point(spec, machine("a100"))
    assert h100 is not None
    assert a100 is not None
    assert h100.compute_dtype == "fp8"
    assert round(h100.rows) == 258  # half the bytes, twice the rate
    assert a100.compute_dtype == "bfloat16"
    assert a100.peak_rows == pytest.approx(312 / 2.039 / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("experts", "chosen", "tokens", "distinct"), [(128, 8, 64, 125.94), (64, 4, 1, 4.0), (64, 4, 16, 41.2)]
)
def test_expected_distinct_experts(experts: int, chosen: int, tokens: int, distinct: float) -> None:
    assert expected_distinct(experts, chosen, tokens) == pytest.approx(distinct, abs=0.05)
    rng = np.random.default_rng(0)
    draws = [
        len({int(e) for _ in range(tokens) for e in rng.choice(experts, chosen, replace=False)})
        for _ in range(60)
    ]
    error = np.std(draws) / np.sqrt(len(draws))
    assert abs(np.mean(draws) - expected_distinct(experts, chosen, tokens)) <= 3 * error + 1e-9


def test_utilisation() -> None:
    mixtral, qwen = spec_of("mixtral-8x22b").moe_layers[0][1], spec_of("qwen3-235b-a22b").moe_layers[0][1]
    rates = {"flops_per_s": 312e12, "bytes_per_s": 2.0e12}
    assert expert_utilisation(mixtral, 156, **rates) == 0.25
    assert round(expert_utilisation(qwen, 400, **rates), 2) == 0.16
    assert expert_utilisation(mixtral, 10_000, **rates) == 1.0


def test_a_step_reads_every_other_weight_once_and_the_chosen_experts() -> None:
    spec = spec_of("mixtral-8x7b")
    one, many = step_traffic(spec, 1, 100), step_traffic(spec, 10_000, 100)
    sizes = weight_bytes(spec)
    assert one.expert_bytes == sizes["routed_experts"] // 4
    assert many.expert_bytes == sizes["routed_experts"]
    assert one.other_weight_bytes == sum(sizes.values()) - sizes["routed_experts"] - sizes["embedding"]
    assert one.kv_bytes == 100 * 131_072
    assert one.total == one.expert_bytes + one.other_weight_bytes + one.kv_bytes
    assert (one.distinct_experts, one.rows_per_expert) == (2.0, 1.0)
    assert many.rows_per_expert == pytest.approx(2500)
    with pytest.raises(ConfigError, match="at least 1 token"):
        step_traffic(spec, 0, 100)


def test_a_dense_model_has_no_experts_to_read() -> None:
    found = step_traffic(read_config(CONFIGS["llama"], name="l"), 4, 10)
    assert (found.expert_bytes, found.distinct_experts, found.rows_per_expert) == (0, 0.0, 0.0)


def test_a_tied_embedding_is_read_as_the_head() -> None:
    spec = read_config(CONFIGS["granitemoe"], name="g")
    sizes = weight_bytes(spec)
    assert step_traffic(spec, 1, 1).other_weight_bytes == sum(sizes.values()) - sizes["routed_experts"]


def test_rows_that_travel() -> None:
    assert dispatch_bytes_per_token(spec_of("deepseek-v3")) == 58 * 8 * 7168 * 4
    assert dispatch_bytes_per_token(spec_of("deepseek-v3"), dispatch_bits=8) == 58 * 8 * 7168 * 3
    assert dispatch_bytes_per_token(spec_of("nemotron-3-super")) == 40 * 22 * 1024 * 4
