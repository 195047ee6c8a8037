"""Rotary embeddings from a config: `rope_parameters`, or the older `rope_scaling` beside `rope_theta`."""

from __future__ import annotations

import math
from typing import Literal

from moesaic.errors import ConfigError, nearest
from moesaic.spec.families.keys import Keys, shorten
from moesaic.spec.model import RopeScaling, RopeSpec

Kind = Literal["linear", "dynamic", "yarn", "llama3", "longrope", "proportional"]
_KINDS: dict[str, Kind | None] = {
    "default": None,
    "mrope": None,  # per-axis positions of images; on text all axes are equal and it is plain rope
    "linear": "linear",
    "dynamic": "dynamic",
    "yarn": "yarn",
    "llama3": "llama3",
    "longrope": "longrope",
    "proportional": "proportional",
}
_LENGTHENED: tuple[Kind, ...] = ("yarn", "llama3", "longrope")


def read_rope(
    keys: Keys,
    *,
    head_dim: int,
    max_position: int,
    layer_type: str | None = None,
    is_interleaved: bool = False,
) -> RopeSpec:
    """The rotary embedding over a head of `head_dim`, for the layers of `layer_type` where they differ.

    `keys.defaults` may hold rope_theta, partial_rotary_factor and a whole rope_parameters.

    Raises: ConfigError for an unknown type, a missing or impossible parameter, or two spellings that
    disagree.
    """
    block = _block(keys, layer_type)
    theta = block.number_or_none("rope_theta", low=0.0, is_open=True) if block else None
    if theta is None:
        theta = keys.number_or_none("rope_theta", low=0.0, is_open=True)
    part = block.number_or_none("partial_rotary_factor", low=0.0, is_open=True) if block else None
    if part is None:
        part = keys.number_or_none("partial_rotary_factor", low=0.0, is_open=True)
    part = 1.0 if part is None else part
    if part > 1.0:
        raise keys.fault("partial_rotary_factor", part, "at most 1")
    theta = float(keys.defaults.get("rope_theta", 10_000.0)) if theta is None else theta
    scaling = None if block is None else _read_scaling(keys, block, max_position)
    is_proportional = scaling is not None and scaling.kind == "proportional"
    dim = head_dim if is_proportional else int(head_dim * part)
    dim += dim % 2  # the reference code's frequencies of an odd number of dimensions: one more turns
    if not 0 < dim <= head_dim:
        raise ConfigError(
            f"{keys.where}: rotary embeddings turn pairs of a head's {head_dim} dimensions, not {dim} of them"
        )
    if scaling is not None and scaling.kind == "longrope":
        for name in ("short_factor", "long_factor"):
            length = len(getattr(scaling, name))
            if block is not None and length != dim // 2:
                raise block.fault(name, getattr(scaling, name), f"a list of {dim // 2} numbers, one a pair")
    return RopeSpec(theta=theta, dim=dim, is_interleaved=is_interleaved, scaling=scaling)


def softmax_mscale(rope: RopeSpec) -> float:
    """What DeepSeek's attention multiplies its softmax scale by: mscale_all_dim's yarn factor, squared.

    Source: DeepSeek-V2, arXiv:2405.04434, app. A; the reference modeling code.
    """
    scaling = rope.scaling
    if scaling is None or not scaling.mscale_all_dim or scaling.factor <= 1.0:
        return 1.0
    return (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2


def _block(keys: Keys, layer_type: str | None) -> Keys | None:
    """The parameters in force: `rope_scaling` before `rope_parameters`; in it the entry of the layer type."""
    old, new = _entry(keys, "rope_scaling", layer_type), _entry(keys, "rope_parameters", layer_type)
    if old is None or new is None or not keys.has("rope_parameters"):
        return old if old is not None else new
    old_type, new_type = _type_name(old), _type_name(new)
    old_theta, new_theta = old.config.get("rope_theta"), new.config.get("rope_theta")
    if old_type != new_type or (old_theta is not None and new_theta is not None and old_theta != new_theta):
        raise ConfigError(
            f"{keys.where}: {keys.path('rope_scaling')} says {old_type} (theta {old_theta}) but "
            f"{keys.path('rope_parameters')} says {new_type} (theta {new_theta}); remove one"
        )
    return Keys({**new.config, **old.config}, where=keys.where, prefix=old.prefix)


def _entry(keys: Keys, key: str, layer_type: str | None) -> Keys | None:
    block = keys.below(key)
    if block is None or not block.config:
        return None
    if layer_type is not None and isinstance(block.config.get(layer_type), dict):
        return block.below(layer_type)
    if any(isinstance(value, dict) for value in block.config.values()):
        # Nested by layer type, and this type has none of its own.
        return block.below("full_attention")
    return block


def _type_name(block: Keys) -> str:
    """`rope_type`, or `type` as it was called first."""
    for key in ("rope_type", "type"):
        value = block.config.get(key)
        if value is not None:
            if not isinstance(value, str):
                raise block.fault(key, value, "a string")
            if value not in _KINDS:
                raise ConfigError(
                    f"{block.where}: {block.path(key)} is {shorten(value)}, an unknown rope type; "
                    f"{nearest(value, _KINDS)}"
                )
            return value
    return "default"


def _read_scaling(keys: Keys, block: Keys, max_position: int) -> RopeScaling | None:
    kind = _KINDS[_type_name(block)]
    if kind is None:
        return None
    original = None
    if kind in _LENGTHENED:
        outer = keys.whole_or_none("original_max_position_embeddings")
        original = outer or block.whole_or_none("original_max_position_embeddings") or max_position
    factor = block.number_or_none("factor", low=0.0, is_open=True)
    if factor is None and kind in ("yarn", "longrope") and original is not None:
        factor = max_position / original
    if factor is None and kind == "proportional":
        factor = 1.0
    if factor is None:
        raise block.missing("factor", f"rope type {kind} needs it")
    if kind == "longrope" and not (block.has("short_factor") and block.has("long_factor")):
        raise block.missing(
            "short_factor" if not block.has("short_factor") else "long_factor", "rope type longrope needs it"
        )
    low = block.number_or_none("low_freq_factor", low=0.0, is_open=True)
    high = block.number_or_none("high_freq_factor", low=0.0, is_open=True)
    if kind == "llama3" and (low is None or high is None):
        raise block.missing(
            "low_freq_factor" if low is None else "high_freq_factor", "rope type llama3 needs it"
        )
    if kind == "llama3" and low is not None and high is not None and high <= low:
        raise block.fault("high_freq_factor", high, f"above low_freq_factor ({low:g})")
    truncate = block.config.get("truncate")
    if truncate is not None and not isinstance(truncate, bool):
        raise block.fault("truncate", truncate, "true or false")
    part = block.number_or_none("partial_rotary_factor", low=0.0)
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_max_position=original,
        beta_fast=block.number_or_none("beta_fast") or 32.0,
        beta_slow=block.number_or_none("beta_slow") or 1.0,
        mscale=block.number_or_none("mscale"),
        mscale_all_dim=block.number_or_none("mscale_all_dim"),
        attention_factor=block.number_or_none("attention_factor", low=0.0),
        truncate=truncate is not False,
        low_freq_factor=1.0 if low is None else low,
        high_freq_factor=4.0 if high is None else high,
        short_factor=block.numbers("short_factor"),
        long_factor=block.numbers("long_factor"),
        proportion=1.0 if part is None or kind != "proportional" else part,
    )
