"""Qwen3-Next against transformers: delta-rule layers, gated attention, norms stored as distances from one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Config, Layout, qwen3_next_config, random_tensors, write_checkpoint
from parity import (
    FLOAT32_TOLERANCE,
    MUTATION_SHOWS,
    Mutation,
    Oracle,
    assert_same_greedy,
    each_layer,
    experts,
    field,
    gates,
    logits_of,
    max_difference,
    prompt_logits,
)
from torch import Tensor

from moesaic.errors import CheckpointError
from moesaic.kernels.reference import ReferenceOps
from moesaic.layers.attention import GqaAttention
from moesaic.layers.delta import GatedDelta
from moesaic.models.build import LoadedModel, load
from moesaic.spec.model import GqaSpec, LayerSpec, LinearSpec, ModelSpec
from moesaic.spec.numerics import preset

VARIANTS: dict[str, Config] = {
    "as it is": {},
    "other sizes": {
        "norm_topk_prob": False,
        "mlp_only_layers": [],
        "attention_bias": True,
        "tie_word_embeddings": True,
        "layer_types": None,
        "full_attention_interval": 2,
        "linear_key_head_dim": 7,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_conv_kernel_dim": 2,
        "partial_rotary_factor": 0.25,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_logits(tmp_path: Path, variant: str) -> None:
    folder = write_checkpoint(tmp_path, qwen3_next_config(**VARIANTS[variant]))
    assert max_difference(folder) < FLOAT32_TOLERANCE


@pytest.mark.parametrize(("layout", "num_files"), [("stacked", 2), ("per_expert", 3)])
def test_equal_bits_in_each_layout(tmp_path: Path, layout: Layout, num_files: int) -> None:
    first = load(write_checkpoint(tmp_path / "one", qwen3_next_config()), num_threads=1)
    other = write_checkpoint(tmp_path / "other", qwen3_next_config(), layout=layout, num_files=num_files)
    assert torch.equal(logits_of(first), logits_of(load(other, num_threads=1)))


def test_what_transformers_saves_loads(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "ours", qwen3_next_config(), layout="stacked")
    Oracle(folder).model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load(tmp_path / name, num_threads=1) for name in ("ours", "theirs"))
    assert torch.equal(logits_of(ours), logits_of(theirs))


def test_equal_greedy_tokens(tmp_path: Path) -> None:
    assert_same_greedy(write_checkpoint(tmp_path, qwen3_next_config()))


def test_prediction_layers_are_known_and_unused(tmp_path: Path) -> None:
    tensors = random_tensors(qwen3_next_config())
    extra = {"mtp.fc.weight": torch.ones(64, 128), "mtp.layers.0.mlp.gate.weight": torch.ones(8, 64)}
    model = load(write_checkpoint(tmp_path, qwen3_next_config(), tensors=tensors | extra), num_threads=1)
    assert {unused.key for unused in model.accounting.unused} == set(extra)
    write_checkpoint(tmp_path, qwen3_next_config(), tensors=tensors | {"mtq.fc.weight": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"1 tensors fill no parameter: mtq\.fc\.weight"):
        load(tmp_path, num_threads=1)


def test_a_missing_or_misshapen_tensor_is_named(tmp_path: Path) -> None:
    tensors = random_tensors(qwen3_next_config())
    name = "model.layers.2.linear_attn.A_log"
    lacking = {key: value for key, value in tensors.items() if key != name}
    write_checkpoint(tmp_path, qwen3_next_config(), tensors=lacking)
    with pytest.raises(CheckpointError, match=r"1 parameters are filled by no tensor: .*A_log"):
        load(tmp_path, num_threads=1)
    write_checkpoint(tmp_path, qwen3_next_config(), tensors=tensors | {name: torch.ones(5)})
    with pytest.raises(CheckpointError, match=r"A_log .*has shape \[5\], but config.json implies \[6\]"):
        load(tmp_path, num_threads=1)


def attention(**changes: Any) -> Callable[[ModelSpec], ModelSpec]:
    """Every grouped-query mixer with some fields changed."""

    def change(layer: LayerSpec) -> LayerSpec:
        is_ours = isinstance(layer.mixer, GqaSpec)
        return replace(layer, mixer=replace(layer.mixer, **changes)) if is_ours else layer

    return each_layer(change)


def linear(**changes: Any) -> Callable[[ModelSpec], ModelSpec]:
    """Every linear mixer with some fields changed."""

    def change(layer: LayerSpec) -> LayerSpec:
        is_ours = isinstance(layer.mixer, LinearSpec)
        return replace(layer, mixer=replace(layer.mixer, **changes)) if is_ours else layer

    return each_layer(change)


def ungated_shared(spec: ModelSpec) -> ModelSpec:
    """Without the gate of the shared expert."""
    moe = spec.moe_layers[0][1]
    assert moe.shared is not None
    return experts(shared=replace(moe.shared, has_output_gate=False))(spec)


MUTATIONS: dict[str, Mutation] = {
    "norm weights as they are stored": Mutation(change=field(norm_offset=0.0)),
    "no q and k norms": Mutation(change=attention(qk_norm="none"), drops=r"self_attn\.[qk]_norm"),
    "softmax scale": Mutation(change=attention(softmax_scale=0.2)),
    "no rope": Mutation(change=attention(rope=None)),
    "another activation after the convolution": Mutation(change=linear(activation="gelu")),
    "no gate on the shared expert": Mutation(change=ungated_shared, drops=r"shared_expert_gate"),
    "norm epsilon": Mutation(change=field(norm_eps=1e-5)),
    "not renormalised": Mutation(change=gates(is_renormalised=False)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), qwen3_next_config())


@pytest.fixture(scope="module")
def base(folder: Path) -> Tensor:
    return prompt_logits(folder)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_changed_feature_shows(folder: Path, base: Tensor, name: str) -> None:
    assert (prompt_logits(folder, MUTATIONS[name]) - base).abs().max() > MUTATION_SHOWS


class NoConvolution(ReferenceOps):
    def causal_conv(self, x_TF, weight_FX, view):  # type: ignore[no-untyped-def]
        return x_TF


class NoUnitLength(ReferenceOps):
    def l2_norm(self, x, eps):  # type: ignore[no-untyped-def]
        return x.float()


class NoDecay(ReferenceOps):
    def delta_rule(self, q, k, v, log_decay, beta, view):  # type: ignore[no-untyped-def]
        return super().delta_rule(q, k, v, torch.zeros_like(log_decay), beta, view)


class NoRateOfChange(ReferenceOps):
    def delta_rule(self, q, k, v, log_decay, beta, view):  # type: ignore[no-untyped-def]
        return super().delta_rule(q, k, v, log_decay, torch.ones_like(beta), view)


class NoMemory(ReferenceOps):
    """Each token sees itself alone."""

    def delta_rule(self, q, k, v, log_decay, beta, view):  # type: ignore[no-untyped-def]
        return super().delta_rule(q, k, v, torch.full_like(log_decay, -1e3), beta, view)


class NoGate(ReferenceOps):
    """Neither that of the delta rule's norm nor attention's; the convolution keeps its activation."""

    def activation(self, gate, up, kind):  # type: ignore[no-untyped-def]
        return super().activation(gate, up, kind) if up is None else up

    def sigmoid(self, x):  # type: ignore[no-untyped-def]
        return torch.ones_like(x, dtype=torch.float32)


PARTS: dict[str, tuple[type[ReferenceOps], type]] = {
    "convolution": (NoConvolution, GatedDelta),
    "length of queries and keys": (NoUnitLength, GatedDelta),
    "decay": (NoDecay, GatedDelta),
    "rate of change": (NoRateOfChange, GatedDelta),
    "memory": (NoMemory, GatedDelta),
    "gate of the norm": (NoGate, GatedDelta),
    "gate of attention": (NoGate, GqaAttention),
}


def without(model: LoadedModel, ops: type[ReferenceOps], mixer: type) -> LoadedModel:
    """The model with other ops in its mixers of one kind."""
    changed = 0
    for layer in model.decoder.layers:
        if layer.mixer is not None and isinstance(layer.mixer.mixer, mixer):
            layer.mixer.mixer._ops = ops(preset("portable", dtype="float32"), num_threads=1)
            changed += 1
    assert changed, "no layer has such a mixer"
    return model


@pytest.mark.parametrize("name", PARTS)
def test_a_part_left_out_shows(folder: Path, base: Tensor, name: str) -> None:
    found = logits_of(without(load(folder, num_threads=1, backend="reference"), *PARTS[name]))
    assert (found - base).abs().max() > MUTATION_SHOWS


def test_replacing_the_ops_changes_nothing_by_itself(folder: Path, base: Tensor) -> None:
    model = without(load(folder, num_threads=1, backend="reference"), ReferenceOps, GatedDelta)
    assert torch.equal(logits_of(model), base)
