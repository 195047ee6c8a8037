"""Bytes that a model needs: weights by component, KV per token, state per sequence; devices to hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from moesaic.account.params import count_params, expert_biases, expert_weights
from moesaic.errors import ConfigError, nearest
from moesaic.spec.model import Component, MlaSpec, ModelSpec, MoeSpec
from moesaic.spec.numerics import DTYPE_BYTES, KvFormat
from moesaic.spec.quantised import QUANTISED, SCALE_BYTES

USABLE_SHARE = 0.9
"""Part of a device's memory that weights and KV may fill; the rest is activations, buffers and the runtime.

Source: the default of vLLM's gpu_memory_utilization in its 0.x releases.
"""

WEIGHT_BITS: Mapping[str, float] = {
    "float32": 32.0,
    "bfloat16": 16.0,
    "float16": 16.0,
    "fp8": 8.0 + 32.0 / (128 * 128),  # a float32 scale for a block of 128 x 128
    "nvfp4": 4.0 + 8.0 / 16,  # an e4m3 scale for 16
    "mxfp4": 4.0 + 8.0 / 32,  # an e8m0 scale for 32
    "int8": 8.0 + 16.0 / 128,  # a 16-bit scale for 128
    "int4": 4.0 + 16.0 / 128,
}
"""Bits per weight with its share of scales, in the usual layout of each format.

Source: DeepSeek-V3, arXiv:2412.19437, sec. 3.3 (fp8 blocks); OCP Microscaling v1.0 (mxfp4); the usual group
of GPTQ and AWQ (int4).
"""

SCALE_BLOCK: Mapping[str, int] = {"fp8": 128, "nvfp4": 16, "int4": 128}
"""Weights that share a scale along the sliced axis of an expert. MXFP4 is not here: engines give ranks whole
blocks of it, some one more than others.

Source: DeepSeek-V3, arXiv:2412.19437, sec. 3.3 (fp8); the usual group of GPTQ and AWQ (int4).
"""

_QUANTISED: tuple[Component, ...] = ("attention", "routed_experts", "shared_experts", "dense_ffn")


@dataclass(frozen=True, kw_only=True, slots=True)
class KvFootprint:
    """What a sequence keeps. Windows are (tokens seen, bytes per token over the layers with that window).

    Units:  bytes.
    """

    bytes_per_token: int  # layers that keep every token
    windows: tuple[tuple[int, int], ...]
    state_bytes: int  # per sequence, whatever its length

    @property
    def bytes_per_token_inside(self) -> int:
        """A token's bytes while it is inside every window."""
        return self.bytes_per_token + sum(size for _, size in self.windows)

    def sequence_bytes(self, num_tokens: int) -> int:
        """KV and state of one sequence of `num_tokens`."""
        windows = sum(size * min(num_tokens, window) for window, size in self.windows)
        return self.bytes_per_token * num_tokens + windows + self.state_bytes


def kv_footprint(spec: ModelSpec, kv_format: KvFormat = "bfloat16") -> KvFootprint:
    """KV and state of one sequence, over all layers.

    Source: K and V are 2 * kv_heads * head_dim numbers a token and layer (131,072 B for Mixtral-8x7B); a
    latent is kv_lora_rank + rope_dim (70,272 B for DeepSeek-V3, arXiv:2405.04434, table 1).
    """
    per_token, state = 0, 0
    windows: dict[int, int] = {}
    for layer in spec.layers:
        for cache in layer.caches(kv_format):
            state += cache.bytes_per_sequence
            if cache.kind == "window" and cache.window is not None:
                windows[cache.window] = windows.get(cache.window, 0) + cache.bytes_per_token
            else:
                per_token += cache.bytes_per_token
    return KvFootprint(bytes_per_token=per_token, windows=tuple(sorted(windows.items())), state_bytes=state)


def weight_bytes(spec: ModelSpec, weight_format: str | None = None) -> Mapping[Component, int]:
    """Bytes of the weights by component, scales included.

    In the checkpoint's own formats, or with every matrix of attention and feed-forward in `weight_format` and
    the rest (embeddings, router, norms) in the checkpoint's own. A 16-bit or 32-bit format holds for
    everything.

    Raises: ConfigError for an unknown format.
    """
    if weight_format is not None and weight_format not in WEIGHT_BITS:
        raise ConfigError(f"unknown weight format {weight_format!r}; {nearest(weight_format, WEIGHT_BITS)}")
    is_plain = weight_format is not None and WEIGHT_BITS[weight_format] >= 16
    found: dict[Component, int] = {}
    for component, count in count_params(spec).total.items():
        bits = spec.stored_format(component).bits
        if weight_format is not None and (is_plain or component in _QUANTISED):
            bits = WEIGHT_BITS[weight_format]
        size = count * bits / 8
        if component == "routed_experts":
            size = sum(moe.num_experts * _expert_size(spec, moe, bits) for _, moe in spec.moe_layers)
        found[component] = round(size)
    return found


def rounded_bytes(spec: ModelSpec, format: str) -> int:
    """About how much memory our engine's weights take when they are rounded to an integer format on load.

    Left out are the padding of odd shapes and small matrices that stay floats: some percent.

    Raises: ConfigError for a format that is not one of integers.
    """
    if format not in QUANTISED:
        raise ConfigError(f"{format!r} is not a format of integers; {nearest(format, QUANTISED)}")
    kind, own_bits = QUANTISED[format], 8.0 * DTYPE_BYTES[spec.dtype]
    group_bits = 8.0 * SCALE_BYTES + 8.0 * kind.has_zeros
    rounded_bits = kind.bits + group_bits / kind.group_size(spec.hidden)
    total = dict(count_params(spec).total)
    # A tied head is a rounded copy beside the embedding.
    total["head"] += spec.vocab * spec.hidden if spec.has_tied_head else 0
    # Latent attention keeps the maps of its heads in float32.
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, MlaSpec)]
    wide = sum(one.num_heads * (one.nope_dim + one.value_dim) * one.kv_lora_rank for one in mixers)
    total["attention"] -= wide
    bits = dict.fromkeys((*_QUANTISED, "head"), rounded_bits) | {"router": 32.0}
    num_bits = sum(count * bits.get(component, own_bits) for component, count in total.items())
    return round((num_bits + 32 * wide) / 8)


def scale_block(spec: ModelSpec, weight_format: str | None = None) -> int:
    """Columns of an expert that share a scale: a slice of it holds whole blocks. 1: any slice will do.

    `weight_format` None: as the checkpoint stores them.
    """
    if weight_format is not None:
        return SCALE_BLOCK.get(weight_format, 1)
    stored = spec.stored_format("routed_experts")
    has_one_scale = stored.format == "fp8" and stored.bits == 8.0  # a whole matrix shares it
    return 1 if has_one_scale else SCALE_BLOCK.get(stored.format, 1)


def expert_bytes(spec: ModelSpec, moe: MoeSpec, weight_format: str | None = None) -> int:
    """Bytes of one routed expert, scales and biases included."""
    bits = spec.stored_format("routed_experts").bits if weight_format is None else WEIGHT_BITS[weight_format]
    return round(_expert_size(spec, moe, bits))


def _expert_size(spec: ModelSpec, moe: MoeSpec, bits: float) -> float:
    """Biases stay in the checkpoint's own dtype when the matrices are quantised."""
    bias_bits = max(bits, 16.0) if bits < 16 else bits
    return (expert_weights(moe) * bits + expert_biases(moe) * bias_bits) / 8


def devices_for_weights(num_bytes: int, memory_bytes: int, *, usable: float = USABLE_SHARE) -> int:
    """How many devices hold weights of `num_bytes`, without any KV.

    Source: ceil(weights / (0.9 * memory)): DeepSeek-V3 in bfloat16 over 80 GB is 19, in fp8 10.
    Raises: ConfigError unless 0 < usable <= 1 and the memory is above zero.
    """
    if not 0.0 < usable <= 1.0 or memory_bytes <= 0:
        raise ConfigError(
            f"a device needs memory above 0 and a usable share in (0, 1], got {memory_bytes}, {usable}"
        )
    return math.ceil(num_bytes / (usable * memory_bytes))


def largest_batch(*, num_devices: int, memory_bytes: int, weights: int, sequence_bytes: int) -> int:
    """Sequences whose KV fits beside the weights, all devices taken as one memory; 0 when those do not fit.

    Source: floor((n * 0.9 * memory - weights) / KV of a sequence).
    """
    free = num_devices * USABLE_SHARE * memory_bytes - weights
    return max(0, math.floor(free / max(sequence_bytes, 1)))
