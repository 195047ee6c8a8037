"""Golden figures of the shipped calibration: drift is allowed, nonsense is not."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.cost.calibrated import predict, profile_named, shipped
from moesaic.cost.layouts import Split, step_cost
from moesaic.cost.load import EVEN
from moesaic.cost.ops import Formats, Work
from moesaic.cost.serving import Traffic
from moesaic.cost.term import seconds_by_name, step_seconds
from moesaic.errors import ConfigError
from moesaic.spec.families import read_config
from moesaic.spec.hardware import cluster
from moesaic.spec.locate import preset


def model(name: str):
    return read_config(preset(name).config, name=name)


GOLDEN = [
    # Measured on public benchmarks, milliseconds a token; within a quarter.
    ("minimax-m2", "h200x8", 8, 8, "vllm", Formats(dense="fp8", experts="fp8"), 1024, 8, 9.21),
    ("kimi-k2.5", "b200x8", 8, 8, "vllm", Formats(dense="int4", experts="int4"), 8192, 16, 19.7),
    ("deepseek-v3", "h200x8", 8, 8, "sglang", Formats(dense="fp8", experts="fp8"), 1024, 64, 33.0),
]


@pytest.mark.parametrize(
    ("name", "machine", "tp", "slices", "backend", "formats", "prompt", "batch", "tpot"), GOLDEN
)
def test_measured_times(name, machine, tp, slices, backend, formats, prompt, batch, tpot) -> None:
    found = predict(
        model(name), cluster(machine), Split(tp=tp, expert_tp=slices),
        Traffic(prompt=float(prompt), output=1024.0, batch=float(batch)), backend=backend, formats=formats,
    )  # fmt: skip
    assert float(found.tpot_s.value) * 1e3 == pytest.approx(tpot, rel=0.25)
    assert found.tpot_s.low <= found.tpot_s.value <= found.tpot_s.high
    assert found.ttft_s.low <= found.ttft_s.value <= found.ttft_s.high


def test_an_engine_without_a_name_is_between_the_named_ones() -> None:
    def tpot(backend: str | None) -> float:
        traffic = Traffic(prompt=1024.0, output=1024.0, batch=32.0)
        split = Split(tp=8, expert_tp=8)
        return float(
            predict(model("glm-5"), cluster("b200x8"), split, traffic, backend=backend).phases.tpot_s
        )

    named = [tpot(backend) for backend in ("sglang", "trtllm", "vllm")]
    assert min(named) <= tpot(None) <= max(named)
    with pytest.raises(ConfigError, match="no calibration for the backend 'vlm'; did you mean vllm"):
        tpot("vlm")


def test_fitted_numbers_are_physical() -> None:
    """Nothing beats the datasheet by more than noise, and no launch takes a millisecond."""
    for machine in ("h100x8", "b200x8"):
        for backend in (None, "sglang", "trtllm", "vllm"):
            profile = shipped().profile(cluster(machine), backend)
            assert all(0.15 < share < 1.15 for share in profile.compute_share.values())
            assert all(0.5 < share < 1.25 for share in profile.memory_share.values())
            assert all(0 <= seconds < 1e-4 for seconds in profile.launch_s.values())
            assert profile.launch_power >= 1


def test_few_rows_wide_experts_and_a_hundred_ranks_stay_sane() -> None:
    """Far outside of what was fitted: slower than the datasheet, and not absurdly so."""
    v3, cards = model("deepseek-v3"), cluster("h800x8x18")
    profile = profile_named("calibrated", cards)
    work = Work(num_seqs=128.0, new_tokens=1.0, past=4096.0)
    cost = step_cost(
        v3,
        cards,
        Split(dp=144, ep=144, num_redundant=32),
        work,
        profile=profile,
        formats=Formats(dispatch_bits=8),
    )
    speed = 128 / float(step_seconds(cost).value)
    assert 700 < speed < 2700  # the profile that DeepSeek published: 2,324 with overlap
    assert float(sum(seconds_by_name(cost).values())) == pytest.approx(float(step_seconds(cost).value))


DEEPEP = {8: (77, 114), 16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360)}
"""Microseconds of a dispatch in fp8 and a combine in bfloat16 of 128 tokens, top 8, width 7168, on H800."""


@pytest.mark.parametrize(("ranks", "measured"), DEEPEP.items())
def test_measured_exchanges_of_a_layer(ranks: int, measured: tuple[int, int]) -> None:
    """Within 22 % over nodes. In one node DeepEP's kernels still send every choice: a third more."""
    v3, cards = model("deepseek-v3"), cluster(f"h800x8x{ranks // 8}")
    cost = step_cost(
        v3, cards, Split(dp=ranks, ep=ranks), Work(num_seqs=128.0, new_tokens=1.0, past=4096.0),
        profile=profile_named("calibrated", cards), formats=Formats(dispatch_bits=8.25), shares=EVEN,
    )  # fmt: skip
    parts = seconds_by_name(cost)
    for name, microseconds in zip(("dispatch", "combine"), measured, strict=True):
        assert float(parts[name]) / 58 * 1e6 == pytest.approx(microseconds, rel=0.22 if ranks > 8 else 0.35)


def test_thousands_of_candidates_in_one_walk() -> None:
    rng = np.random.default_rng(0)
    tp, ep = 2.0 ** rng.integers(0, 4, 5000), 2.0 ** rng.integers(0, 6, 5000)
    split = Split(tp=tp, dp=32 / tp, ep=ep, expert_tp=32 / ep)
    cards = cluster("h200x8x4")
    work = Work(num_seqs=rng.integers(1, 256, 5000).astype(float), new_tokens=1.0, past=4096.0)
    cost = step_cost(model("deepseek-v3"), cards, split, work, profile=profile_named("calibrated", cards))
    assert step_seconds(cost).value.shape == (5000,)
    assert np.all(np.isfinite(step_seconds(cost).value))
