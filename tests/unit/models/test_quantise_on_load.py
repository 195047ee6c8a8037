"""Weights that are rounded while they load: what is, what is not, how many bytes that takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import (
    CONFIGS,
    llama_config,
    mixtral_config,
    qwen3_moe_config,
    random_tensors,
    write_checkpoint,
)
from paged import PagedModel, random_tokens
from torch import Tensor

from moesaic.account.memory import rounded_bytes
from moesaic.audit.inspect import inspect
from moesaic.cli.inspect import render
from moesaic.errors import CheckpointError, ConfigError, HostMemoryShort
from moesaic.kernels.ops import backends
from moesaic.kernels.panel import PanelWeight
from moesaic.models.build import LoadedModel, load
from moesaic.spec.locate import locate
from moesaic.spec.numerics import Effect, Format


def logits_of(model: LoadedModel) -> Tensor:
    return PagedModel(model).run("r", random_tokens(24, model.spec.vocab, seed=3))


def tensor_bytes(found: object, seen: set[int]) -> int:
    """Bytes of every tensor that an object holds, each place in memory once."""
    if isinstance(found, PanelWeight):
        return tensor_bytes(found.data, seen)
    if isinstance(found, Tensor):
        start = found.data_ptr()
        size = 0 if start in seen else found.nbytes
        seen.add(start)
        return size
    items = found.values() if isinstance(found, dict) else found if isinstance(found, list | tuple) else ()
    return sum(tensor_bytes(one, seen) for one in items)


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_is_another_function_alike_on_every_backend(tmp_path: Path, family: str) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS[family]())
    exact = logits_of(load(folder, num_threads=1))
    found = {}
    for backend in backends():
        model = load(folder, num_threads=1, format="int8-g32", backend=backend)
        assert model.numerics.effects() == (("weights=int8-g32", Effect.LOSSY),)
        assert isinstance(model.decoder.head.weight_VD, PanelWeight)
        assert isinstance(model.decoder.embedding_VD, Tensor)
        found[backend] = logits_of(model)
    for logits in found.values():
        assert not torch.equal(logits, exact)
        assert float((logits - exact).norm() / exact.norm()) < 0.2


def test_the_digest_of_the_numerics_names_the_format(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, qwen3_moe_config())
    models = [load(folder, num_threads=1, format=one) for one in (None, "int8", "int4-g32")]
    assert len({model.numerics.digest() for model in models}) == 3


@pytest.mark.parametrize("config", [llama_config(), mixtral_config()])
@pytest.mark.parametrize("format", ["int8", "int4-g32"])
def test_bytes_in_memory_are_those_that_are_stated(tmp_path: Path, config: dict, format: str) -> None:
    config = config | {"tie_word_embeddings": True}
    tensors = {name: x for name, x in random_tensors(config).items() if name != "lm_head.weight"}
    model = load(
        write_checkpoint(tmp_path, config, tensors=tensors), num_threads=1, format=format, backend="reference"
    )  # type: ignore[arg-type]
    decoder = model.decoder
    held = [decoder.embedding_VD, decoder.head.weight_VD, decoder.norm.weight_D]  # type: ignore[attr-defined]
    for layer in decoder.layers:
        for half in (layer.mixer, layer.ffn):
            assert half is not None
            held += [half.norm.weight_D]  # type: ignore[union-attr]
            inside = half.mixer if hasattr(half, "mixer") else half.ffn  # type: ignore[union-attr]
            for one in vars(inside).values():
                held += [
                    weight
                    for weight in (getattr(one, "weight_FD", getattr(one, "weight_DF", None)),)
                    if weight is not None
                ]
            router = getattr(inside, "router", None)
            held += [] if router is None else [x for x in vars(router).values() if isinstance(x, Tensor)]
    experts = 0 if model.store is None else model.store.weight_bytes
    assert tensor_bytes(held, set()) + experts == model.weight_bytes


@pytest.mark.parametrize("format", ["int8", "int4-g32-zp", "int4-g128"])
def test_inspect_states_about_what_loading_takes(format: Format) -> None:
    folder = locate("demo", hub=None, needs_weights=True).weights_folder()
    taken = load(folder, num_threads=1, format=format).weight_bytes
    stated = inspect("demo")
    assert stated.rounded_bytes[format] == pytest.approx(taken, rel=0.1)
    assert "lossy" in render(stated)
    with pytest.raises(ConfigError, match="not a format of integers"):
        rounded_bytes(load(folder, num_threads=1).spec, "bfloat16")


def test_too_little_memory_is_counted_in_the_format(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, qwen3_moe_config())
    need = load(folder, num_threads=1, format="int4-g32").weight_bytes
    plain = load(folder, num_threads=1).weight_bytes
    assert need < 0.7 * plain
    with pytest.raises(HostMemoryShort, match="weights in int4-g32"):
        load(folder, num_threads=1, format="int4-g32", available_bytes=need)
    load(folder, num_threads=1, format="int4-g32", available_bytes=plain)


def test_a_damaged_or_unknown_ask_is_refused_by_name(tmp_path: Path) -> None:
    config = qwen3_moe_config()
    tensors = random_tensors(config)
    name = next(name for name in tensors if "experts.1.up_proj" in name)
    tensors[name] = tensors[name] * 1e9
    folder = write_checkpoint(tmp_path / "large", config, tensors=tensors)
    with pytest.raises(CheckpointError, match=r"expert 1, up: numbers of size .*float16's 65504"):
        load(folder, num_threads=1, format="int4-g32")
    with pytest.raises(ConfigError, match="set the dtype to bfloat16"):
        load(folder, num_threads=1, dtype="float32", format="bfloat16")


def test_wire_and_cache_refuse_formats_of_weights(tmp_path: Path) -> None:
    numerics = load(write_checkpoint(tmp_path, llama_config()), num_threads=1).numerics
    for name, format in (("wire_format", "int8"), ("kv_format", "int4-g32")):
        with pytest.raises(ConfigError, match=f"{name} '{format}' is not built"):
            replace(numerics, **{name: format})
