"""How a checkpoint stores its matrices: format, bits with scales, and of which components.

What is ignored is decided by matching the config's own patterns against the names that modules of each
component have; a component that is quantised on some layers only gets the mean of its bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from moesaic.errors import ConfigError, nearest
from moesaic.spec.families.keys import Keys, shorten
from moesaic.spec.model import Component, DenseSpec, LayerSpec, MoeSpec, StoredFormat

_MATRICES: Mapping[Component, tuple[str, ...]] = {
    "attention": (
        "self_attn.q_proj", "self_attn.o_proj", "linear_attn.out_proj", "mixer.q_proj", "mixer.in_proj",
    ),
    "routed_experts": (
        "mlp.experts.0.down_proj", "block_sparse_moe.experts.0.w1", "feed_forward.experts.0.down_proj",
        "mixer.experts.0.down_proj",
    ),
    "shared_experts": (
        "mlp.shared_experts.down_proj", "mlp.shared_expert.down_proj", "feed_forward.shared_expert.down_proj",
        "mixer.shared_experts.down_proj",
    ),
    "dense_ffn": ("mlp.down_proj", "feed_forward.down_proj", "mixer.down_proj"),
}  # fmt: skip
_ROOTS = ("model", "model.language_model", "language_model.model", "backbone")


class Stored(NamedTuple):
    """A format and its bits per weight."""

    format: str
    bits: float


def read_stored(
    keys: Keys, quant: Keys | None, layers: tuple[LayerSpec, ...], plain: Stored
) -> tuple[StoredFormat, ...]:
    """The components that are not stored as `plain`, the format of the unquantised tensors.

    Raises: ConfigError for a method whose bytes cannot be told.
    """
    if quant is None:
        return ()
    stored = _METHODS[quant.text("quant_method", _METHODS)](quant)
    if stored is None:
        return ()
    ignored = _matcher(keys, quant)
    found = []
    for component, leaves in _MATRICES.items():
        where = [i for i, layer in enumerate(layers) if component in _matrices_of(layer)]
        if stored.format == "mxfp4" and component != "routed_experts":
            continue
        kept = 0
        if ignored is not None:
            kept = sum(any(ignored(f"layers.{i}.{leaf}") for leaf in leaves) for i in where)
        if kept == len(where):
            continue
        bits = (stored.bits * (len(where) - kept) + plain.bits * kept) / len(where)
        found.append(StoredFormat(component=component, format=stored.format, bits=bits))
    return tuple(found)


def _matrices_of(layer: LayerSpec) -> frozenset[Component]:
    found: set[Component] = set() if layer.mixer is None else {"attention"}
    if isinstance(layer.ffn, DenseSpec):
        found.add("dense_ffn")
    if isinstance(layer.ffn, MoeSpec):
        found.add("routed_experts")
        if layer.ffn.shared is not None:
            found.add("shared_experts")
    return frozenset(found)


def _matcher(keys: Keys, quant: Keys) -> Callable[[str], bool] | None:
    """Whether a module, named from `layers.` on, is left unquantised; None when all are quantised.

    Patterns are names, globs, or regexes behind `re:`. What stands before `layers.` differs between exports
    of one model, so it is cut off names and tried in all known ways on the others.
    """
    plain: set[str] = set()
    starts: list[str] = []
    globs: list[str] = []
    regexes: list[re.Pattern[str]] = []
    for item in _patterns(quant):
        root = next((root for root in _ROOTS if item.startswith(f"{root}.layers.")), None)
        short = item if root is None else item[len(root) + 1 :]
        if item.startswith("re:"):
            try:
                regexes.append(re.compile(item[3:]))
            except re.error as error:
                where = f"{keys.where}: {quant.path('ignore')}"
                raise ConfigError(f"{where} has {shorten(item)}, not a regex: {error}") from error
        elif "*" in item[:-1] or "?" in item or "[" in item:
            globs.append(item)
        elif item.endswith("*"):
            starts.append(short[:-1])
        else:
            plain.add(short)
    if not (plain or starts or globs or regexes):
        return None

    def is_ignored(name: str) -> bool:
        parts = name.split(".")
        prefixes = {".".join(parts[:end]) for end in range(2, len(parts) + 1)}
        if not plain.isdisjoint(parts) or not plain.isdisjoint(prefixes):
            return True
        if name.startswith(tuple(starts)):
            return True
        full = [f"{root}.{name}" for root in _ROOTS] if regexes or globs else []
        return any(
            any(regex.match(path) for regex in regexes)
            or any(fnmatchcase(path, glob) or fnmatchcase(path, f"{glob}.*") for glob in globs)
            for path in full
        )

    return is_ignored


def _patterns(quant: Keys) -> list[str]:
    found: list[str] = []
    for key in ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers"):
        value = quant.value(key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise quant.fault(key, value, "a list of module names")
        found += value
    return found


def _fp8(quant: Keys) -> Stored:
    block = quant.value("weight_block_size")
    if block is None:
        return Stored("fp8", 8.0)
    if not (
        isinstance(block, list)
        and len(block) == 2
        and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in block)
    ):
        raise quant.fault("weight_block_size", block, "two whole numbers above 0")
    return Stored("fp8", 8.0 + 32.0 / (block[0] * block[1]))  # one float32 scale a block


def _modelopt(quant: Keys) -> Stored:
    algorithms = {
        "NVFP4": Stored("nvfp4", 4.0 + 8.0 / 16),  # an e4m3 scale for 16 weights
        "NVFP4_AWQ": Stored("nvfp4", 4.0 + 8.0 / 16),
        "FP8": Stored("fp8", 8.0),  # one scale a matrix
        "FP8_PB_WO": Stored("fp8", 8.0 + 32.0 / (128 * 128)),
        "W4A16_AWQ": Stored("int4", 4.0 + 16.0 / 128),
        "W4A8_AWQ": Stored("int4", 4.0 + 16.0 / 128),
    }
    return algorithms[quant.text("quant_algo", algorithms)]


def _mxfp4(quant: Keys) -> Stored:
    return Stored("mxfp4", 4.0 + 8.0 / 32)  # an e8m0 scale for 32 weights


def _compressed_tensors(quant: Keys) -> Stored | None:
    """The widest of the groups, so that mixed formats are never counted too small."""
    groups = quant.below("config_groups")
    if groups is None:
        raise quant.missing("config_groups", "compressed-tensors needs it")
    found = []
    for name in groups.config:
        group = groups.below(name)
        weights = None if group is None else group.below("weights")
        if weights is not None:
            found.append(_group_format(weights))
    return max(found, key=lambda stored: stored.bits) if found else None


def _group_format(weights: Keys) -> Stored:
    bits = weights.whole("num_bits", high=16)
    kind = weights.text("type", ("int", "float"))
    group = weights.whole_or_none("group_size", low=-1)
    block = weights.value("block_structure")
    scale_bits = 16.0
    if kind == "float" and bits == 4:
        scale_bits = 8.0
    per_weight = scale_bits / group if group is not None and group > 0 else 0.0
    if isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block):
        per_weight = 32.0 / (block[0] * block[1])
    if group is not None and group > 0 and weights.value("symmetric") is False:
        per_weight += bits / group
    name = f"int{bits}" if kind == "int" else "fp8" if bits == 8 else "mxfp4" if group == 32 else "nvfp4"
    return Stored(name, bits + per_weight)


def _grouped_int(quant: Keys) -> Stored:
    """GPTQ and AWQ: float16 scales and packed zero points, one of each per group."""
    bits = quant.whole_or_none("bits", high=16) or quant.whole_or_none("w_bit", high=16) or 4
    group = quant.whole_or_none("group_size", low=-1) or quant.whole_or_none("q_group_size", low=-1) or 128
    return Stored(f"int{bits}", bits + ((16.0 + bits) / group if group > 0 else 0.0))


def _bitsandbytes(quant: Keys) -> Stored:
    if quant.flag("load_in_8bit"):
        return Stored("int8", 8.0)
    kind = quant.text_or_none("bnb_4bit_quant_type", ("fp4", "nf4")) or "fp4"
    # A float32 scale for 64 weights; quantised again, 8 bits for 64 and a float32 for 256 of those.
    scale = 8.0 / 64 + 32.0 / (64 * 256) if quant.flag("bnb_4bit_use_double_quant") else 32.0 / 64
    return Stored(kind, 4.0 + scale)


_METHODS: dict[str, Callable[[Keys], Stored | None]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors,
    "gptq": _grouped_int,
    "awq": _grouped_int,
    "bitsandbytes": _bitsandbytes,
}


def plain_format(keys: Keys, names: tuple[Keys, ...]) -> Stored:
    """The format of unquantised tensors, from `dtype` or `torch_dtype` of the first object that sets one.

    A config without one is read as bfloat16: the weights' own dtype decides in the end, and every model
    family known here is released in bfloat16.
    """
    widths = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0}
    for candidate in names:
        for key in ("dtype", "torch_dtype"):
            value = candidate.config.get(key)
            if value is None or value == "auto":
                continue
            name = value.removeprefix("torch.") if isinstance(value, str) else value
            if not isinstance(name, str) or name not in widths:
                raise ConfigError(
                    f"{keys.where}: {candidate.path(key)} is {shorten(value)}; "
                    f"{nearest(str(name)[:40], widths)}"
                )
            return Stored(name, widths[name])
    return Stored("bfloat16", 16.0)
