"""Comparisons with transformers, the oracle for whole models, and changes of a spec that must show in one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from paged import PagedModel, random_tokens
from torch import Tensor

from moesaic.models.build import LoadedModel, build, load, read_spec
from moesaic.models.checkpoint import Checkpoint
from moesaic.spec.model import GateSpec, GqaSpec, LayerSpec, MlaSpec, ModelSpec, MoeSpec
from moesaic.spec.numerics import preset

FLOAT32_TOLERANCE = 1e-4  # largest difference of logits of order one
MUTATION_SHOWS = 1e-3  # smallest difference that a missing feature must make
PROMPT_TOKENS = 90  # past every window and every original rope length of the test configs
GREEDY_TOKENS = 64


class Oracle:
    """A folder as transformers runs it, with its plain attention."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM

        from moesaic.audit.oracle import take_long_factors

        self.model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
        )
        problems = {name: keys for name, keys in info.items() if keys}
        assert not problems, f"transformers does not load the checkpoint whole: {problems}"
        take_long_factors(self.model)

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> Tensor:
        """Logits [n, V] of every token, computed at once."""
        logits_TV: Tensor = self.model(torch.tensor([tokens])).logits[0].float()
        return logits_TV

    @torch.inference_mode()
    def greedy(self, prompt: list[int], num_tokens: int) -> tuple[list[int], float]:
        """The most likely tokens after a prompt, and by how much the closest decision was won."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)  # filled in place
        tokens, found, margin = torch.tensor([prompt]), list[int](), float("inf")
        for _ in range(num_tokens):
            logits_TV = self.model(tokens, cache=cache, use_cache=True).logits[0]
            best = logits_TV[-1].float().topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            found.append(int(best.indices[0]))
            tokens = torch.tensor([found[-1:]])
        return found, margin


def max_difference(folder: Path) -> float:
    """The largest difference of logits between the oracle and the paged path, in float32.

    Two prompts share every batch, in chunks that end inside blocks.
    """
    oracle = Oracle(folder)
    paged = PagedModel(load(folder, dtype="float32", num_threads=1))
    vocab = paged.model.spec.vocab
    prompts = {
        name: random_tokens(size, vocab, seed=size) for name, size in {"a": PROMPT_TOKENS, "b": 53}.items()
    }
    cuts = {"a": (37, 38, PROMPT_TOKENS), "b": (1, 30, 53)}
    found: dict[str, list[Tensor]] = {name: [] for name in prompts}
    for step in range(3):
        rows = []
        for name, prompt in prompts.items():
            first = cuts[name][step - 1] if step else 0
            rows.append((name, prompt[first : cuts[name][step]]))
        for name, logits in zip(prompts, paged.step(*rows), strict=True):
            found[name].append(logits)
    return max(
        float((torch.cat(found[name]) - oracle.logits(prompt)).abs().max())
        for name, prompt in prompts.items()
    )


def assert_same_greedy(folder: Path) -> None:
    """64 equal greedy tokens: prefill in chunks, then one by one, against the oracle with its own cache."""
    prompt = random_tokens(PROMPT_TOKENS, 256, seed=5)
    expected, margin = Oracle(folder).greedy(prompt, GREEDY_TOKENS)
    assert margin > 1e-3, "the checkpoint's greedy choices are too close to tell implementations apart"
    paged = PagedModel(load(folder, dtype="float32", num_threads=1))
    assert paged.greedy(prompt, GREEDY_TOKENS, chunk=29) == expected


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
    """A spec with one feature changed; `drops` matches the keys that it then has no use for."""

    change: Callable[[ModelSpec], ModelSpec]
    drops: str | None = None


def prompt_logits(folder: Path, mutation: Mutation | None = None) -> Tensor:
    """Logits of one prompt, under the folder's spec or a changed one."""
    spec, checkpoint = read_spec(folder), Checkpoint.open(folder)
    if mutation is not None:
        changed = mutation.change(spec)
        assert changed != spec, "the mutation changes nothing"
        spec = changed
        if mutation.drops is not None:
            kept = {k: v for k, v in checkpoint.tensors.items() if not re.search(mutation.drops, k)}
            assert len(kept) < len(checkpoint.tensors), "the mutation drops nothing"
            checkpoint = Checkpoint(folder, kept)
    model = build(checkpoint, spec, preset("portable", dtype="float32"), num_threads=1)
    return logits_of(model)


def logits_of(model: LoadedModel) -> Tensor:
    """Logits of the prompt that mutations are judged by."""
    prompt = random_tokens(PROMPT_TOKENS, model.spec.vocab, seed=7)
    return PagedModel(model).run("prompt", prompt, chunk=48)


def each_layer(change: Callable[[LayerSpec], LayerSpec]) -> Callable[[ModelSpec], ModelSpec]:
    """A change of every layer."""
    return lambda spec: replace(spec, layers=tuple(change(layer) for layer in spec.layers))


def mixers(**changes: Any) -> Callable[[ModelSpec], ModelSpec]:
    """Every mixer with some fields changed."""

    def change(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.mixer, GqaSpec | MlaSpec)
        return replace(layer, mixer=replace(layer.mixer, **changes))

    return each_layer(change)


def ropes(**changes: Any) -> Callable[[ModelSpec], ModelSpec]:
    """Every rope with some fields changed."""

    def change(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.mixer, GqaSpec | MlaSpec)
        assert layer.mixer.rope is not None
        return replace(layer, mixer=replace(layer.mixer, rope=replace(layer.mixer.rope, **changes)))

    return each_layer(change)


def scalings(**changes: Any) -> Callable[[ModelSpec], ModelSpec]:
    """Every rope scaling with some fields changed."""

    def change(spec: ModelSpec) -> ModelSpec:
        mixer = spec.layers[0].mixer
        assert isinstance(mixer, GqaSpec | MlaSpec)
        assert mixer.rope is not None
        assert mixer.rope.scaling is not None
        return ropes(scaling=replace(mixer.rope.scaling, **changes))(spec)

    return change


def experts(**changes: Any) -> Callable[[ModelSpec], ModelSpec]:
    """Every sparse half with some fields changed."""

    def change(layer: LayerSpec) -> LayerSpec:
        return replace(layer, ffn=replace(layer.ffn, **changes)) if isinstance(layer.ffn, MoeSpec) else layer

    return each_layer(change)


def shared(**changes: Any) -> Callable[[ModelSpec], ModelSpec]:
    """Every shared expert with some fields changed."""

    def change(layer: LayerSpec) -> LayerSpec:
        if not isinstance(layer.ffn, MoeSpec) or layer.ffn.shared is None:
            return layer
        return replace(layer, ffn=replace(layer.ffn, shared=replace(layer.ffn.shared, **changes)))

    return each_layer(change)


def gates(**changes: Any) -> Callable[[ModelSpec], ModelSpec]:
    """Every gate with some fields changed."""

    def change(layer: LayerSpec) -> LayerSpec:
        if not isinstance(layer.ffn, MoeSpec):
            return layer
        gate: GateSpec = replace(layer.ffn.gate, **changes)
        return replace(layer, ffn=replace(layer.ffn, gate=gate))

    return each_layer(change)


def field(**changes: Any) -> Callable[[ModelSpec], ModelSpec]:
    """The model with some fields changed."""
    return lambda spec: replace(spec, **changes)


def softmax_scaled(factor: float) -> Callable[[ModelSpec], ModelSpec]:
    """Every mixer with its softmax scale times a factor."""

    def change(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.mixer, GqaSpec | MlaSpec)
        return replace(layer, mixer=replace(layer.mixer, softmax_scale=layer.mixer.softmax_scale * factor))

    return each_layer(change)


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """`variants` change the config; `mutations` change the spec of the config with `mutated`.

    `more` and `same` are run with the long tests: variants and mutations that another family stands for.
    """

    variants: Mapping[str, Mapping[str, Any]]
    more: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    mutations: Mapping[str, Mutation]
    same: Mapping[str, Mutation] = dataclasses.field(default_factory=dict)
    mutated: Mapping[str, Any] = dataclasses.field(default_factory=dict)
