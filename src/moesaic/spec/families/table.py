"""The table of families, and `read_config`, which finds the row for a config and the text model inside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from moesaic.errors import ConfigError
from moesaic.spec.families import deepseek, gqa, hybrid, qwen, shared
from moesaic.spec.families.defaults import DEFAULTS
from moesaic.spec.families.generic import ALIASES as GENERIC_ALIASES
from moesaic.spec.families.generic import read_generic
from moesaic.spec.families.keys import Keys, shorten
from moesaic.spec.families.parts import WEIGHT_SIZES, Source, check_sizes
from moesaic.spec.model import ModelSpec

TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where wrappers around a language model keep its config; the last one keeps a text_config of its own."""

_EXPERT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts")
ALIASES: Mapping[str, tuple[str, ...]] = {
    **{name: tuple(other for other in _EXPERT_NAMES if other != name) for name in _EXPERT_NAMES},
    "moe_num_experts": ("num_experts", "num_local_experts"),
    "moe_k": ("num_experts_per_tok",),
    "num_experts_per_tok": ("experts_per_token",),
    "num_nextn_predict_layers": ("num_mtp_layers",),
    "layers_block_type": ("layer_types",),
    "n_groups": ("mamba_n_groups",),
    "conv_kernel": ("mamba_d_conv",),
    "use_conv_bias": ("mamba_conv_bias",),
    "d_model": ("hidden_size",),
    "n_heads": ("num_attention_heads",),
    "n_layers": ("num_hidden_layers",),
    "max_seq_len": ("max_position_embeddings",),
}


class Family(NamedTuple):
    """How one model_type is read, and what the engine lacks for it (None: nothing)."""

    reader: Callable[[Source], ModelSpec]
    family: str
    lacks: str | None
    core: tuple[str, ...] = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


_IMAGES = "a vision tower around the text model is not run yet"
_INDEX = "a sparse-attention index is not run yet"


FAMILIES: Mapping[str, Family] = {
    "llama": Family(gqa.read_llama, "llama", None),
    "mixtral": Family(gqa.read_mixtral, "mixtral", None),
    "olmoe": Family(gqa.read_olmoe, "olmoe", None),
    "qwen3_moe": Family(qwen.read_qwen3_moe, "qwen3_moe", None),
    "deepseek_v3": Family(deepseek.read_deepseek_v3, "deepseek_v3", None),
    "kimi_k2": Family(deepseek.read_deepseek_v3, "deepseek_v3", None),
    "kimi_k25": Family(deepseek.read_deepseek_v3, "kimi_k25", None),
    "qwen2_moe": Family(qwen.read_qwen2_moe, "qwen2_moe", None),
    "qwen3_vl_moe": Family(qwen.read_qwen3_moe, "qwen3_vl_moe", _IMAGES),
    "qwen3_next": Family(qwen.read_qwen3_next, "qwen3_next", None),
    "qwen3_5_moe": Family(qwen.read_qwen3_next, "qwen3_5_moe", None),
    "deepseek_v2": Family(deepseek.read_deepseek_v2, "deepseek_v2", None),
    "deepseek_v32": Family(deepseek.read_deepseek_v32, "deepseek_v32", _INDEX),
    "glm_moe_dsa": Family(deepseek.read_glm_moe_dsa, "glm_moe_dsa", _INDEX),
    "glm4_moe_lite": Family(deepseek.read_glm4_moe_lite, "glm4_moe_lite", None),
    "glm4_moe": Family(shared.read_glm4_moe, "glm4_moe", None),
    "dots1": Family(shared.read_dots1, "dots1", None),
    "ernie4_5_moe": Family(shared.read_ernie4_5_moe, "ernie4_5_moe", None),
    "llama4": Family(shared.read_llama4, "llama4", None),
    "granitemoe": Family(gqa.read_granitemoe, "granitemoe", None),
    "phimoe": Family(gqa.read_phimoe, "phimoe", None),
    "minimax_m2": Family(gqa.read_minimax_m2, "minimax_m2", None),
    "gpt_oss": Family(gqa.read_gpt_oss, "gpt_oss", None),
    "dbrx": Family(
        gqa.read_dbrx,
        "dbrx",
        "fused projections and experts of DBRX are not run yet",
        core=("d_model", "n_layers", "n_heads", "vocab_size"),
    ),
    "nemotron_h": Family(
        hybrid.read_nemotron_h,
        "nemotron_h",
        "Mamba-2 mixers are not run yet",
        core=("hidden_size", "num_attention_heads", "vocab_size"),
    ),
    "gemma4": Family(hybrid.read_gemma4, "gemma4", None),
}

RUNNABLE: frozenset[str] = frozenset(row.family for row in FAMILIES.values() if row.lacks is None)
"""Families that `models/` builds."""
RUNNABLE_TYPES = tuple(sorted(name for name, row in FAMILIES.items() if row.lacks is None))
"""Their model_types, which are more: several may be of one family."""


def read_config(config: Mapping[str, Any], *, name: str) -> ModelSpec:
    """The model that a Hugging Face config.json describes. `name` is what error messages call the file.

    A known model_type is read exactly: an absent key means its class's default. Another is read by the usual
    keys, which `reader == "generic"` and a reason say.

    Raises: ConfigError for a missing, mistyped, impossible or contradictory value, naming key, value and
    rule.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"{name}: a config must be a JSON object, got {shorten(config)}")
    outer_type = _model_type(config, name, "")
    text, prefix = _text_config(config, name)
    text_type = _model_type(text, name, prefix) if prefix else outer_type
    found = _known_type(outer_type, text_type)
    model_type = outer_type or text_type
    if found is None:
        return _read_unknown(config, text, prefix, model_type, name)
    row = FAMILIES[_plain_type(found)]
    keys = Keys(
        text, where=name, prefix=prefix, defaults=DEFAULTS[_plain_type(found)], aliases=_aliases(found)
    )
    _check_core(keys, row, is_nested=bool(prefix))
    check_sizes(keys)
    outer = Keys(config, where=name) if prefix else keys
    spec = row.reader(
        Source(keys=keys, outer=outer, model_type=model_type or found, family=row.family, reader="exact")
    )
    reasons = [] if row.lacks is None else [row.lacks]
    if found is not outer_type and outer_type is not None:
        reasons.append(f"{outer_type} around {found}: only the text model is read, and it is not run yet")
    return replace(spec, runnable_reasons=(*reasons, *spec.runnable_reasons))


def assumed_sizes(config: Mapping[str, Any], *, name: str) -> Mapping[str, int]:
    """Sizes that a known family's config leaves out, and what `read_config` took for them: its class's own.

    For whoever finds that the weights have other sizes.
    """
    text, prefix = _text_config(config, name)
    found = _known_type(_model_type(config, name, ""), _model_type(text, name, prefix))
    if found is None:
        return {}
    defaults = DEFAULTS[_plain_type(found)]
    return {
        key: defaults[key]
        for key in WEIGHT_SIZES
        if isinstance(defaults.get(key), int) and not {key, *ALIASES.get(key, ())} & text.keys()
    }


def _known_type(*model_types: str | None) -> str | None:
    """The first of them that has a row."""
    return next((one for one in model_types if one is not None and _plain_type(one) in FAMILIES), None)


def _plain_type(model_type: str) -> str:
    """The row's name of a model_type: `llama4_text` is the text half of `llama4`."""
    return model_type.removesuffix("_text")


def _aliases(model_type: str) -> Mapping[str, tuple[str, ...]]:
    """Other names of keys; `layer_types` means something else where layers have no block types."""
    if _plain_type(model_type) == "nemotron_h":
        return ALIASES
    return {key: names for key, names in ALIASES.items() if key != "layers_block_type"}


def _model_type(config: Mapping[str, Any], name: str, prefix: str) -> str | None:
    return Keys(config, where=name, prefix=prefix).text_or_none("model_type") or None


def _text_config(config: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], str]:
    """The object with the language model's sizes and its path; the config itself when it is not nested."""
    for key in TEXT_KEYS:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}: {key} must be a JSON object, got {shorten(value)}")
        if value and not any(core in config for core in ("hidden_size", "d_model", "num_hidden_layers")):
            inner, prefix = _text_config(value, name)
            return inner, f"{key}.{prefix}"
    return config, ""


def _check_core(keys: Keys, row: Family, *, is_nested: bool) -> None:
    """Sizes that every written config holds. A nested one may leave out what equals its class's default."""
    if is_nested and any(keys.has(key) for key in row.core):
        return
    for key in row.core:
        if not keys.has(key):
            raise keys.missing(key, "without it the file describes no model")


def _read_unknown(
    config: Mapping[str, Any], text: Mapping[str, Any], prefix: str, model_type: str | None, name: str
) -> ModelSpec:
    keys = Keys(text, where=name, prefix=prefix, aliases=GENERIC_ALIASES)
    outer = Keys(config, where=name) if prefix else keys
    check_sizes(keys)
    spec = read_generic(
        Source(keys=keys, outer=outer, model_type=model_type or "unknown", family="generic", reader="generic")
    )
    called = (
        f"unknown model type ({model_type})"
        if model_type
        else ("config.json has no model_type (it names the architecture: write the model's own there)")
    )
    reason = f"{called}: read by the usual keys, so counts may miss parts, and not run"
    return replace(spec, runnable_reasons=(reason, *spec.runnable_reasons))
