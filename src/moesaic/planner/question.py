"""From words to a question for the search: model, machines with prices, formats, load. Reads files, prices
nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from moesaic.account.memory import WEIGHT_BITS
from moesaic.cost.ops import Formats
from moesaic.errors import ConfigError, nearest
from moesaic.planner.space import FormatChoice
from moesaic.spec.hardware import Cluster, Fact, cluster
from moesaic.spec.model import ModelSpec

KV_BITS = {"bfloat16": 16.0, "fp8": 8.0, "int8": 8.0, "fp4": 4.0}
_NAMED_FORMAT = re.compile(r"(?:^|[-_.])(nvfp4|mxfp4|fp8|int8|int4|awq|gptq)(?=$|[-_.])")
DISPATCH_BITS = {"bfloat16": 16.0, "fp8": 8.0 + 32.0 / 128}  # fp8 rows have a float32 scale for 128 numbers

LOSSLESS = "stored"
GIVEN_PRICE = "given by the caller"  # the source of such a price


def clusters_of(
    names: Sequence[str], prices: Sequence[str], extra: Path | None = None
) -> tuple[Cluster, ...]:
    """The clusters called `h200x8x4`, with prices of devices where given as `h200=5.5` or, for all, `5.5`.

    Raises: ConfigError for an unknown machine, and for a price that is no number above 0 or names no machine
            here.
    """
    found = [cluster(name, extra) for name in names]
    if len({one.machine.name for one in found}) < len(found):
        raise ConfigError(
            f"every --machine must be another kind of device, got {', '.join(names)}; add up the nodes"
        )
    for text in prices:
        name, sign, number = text.rpartition("=")
        if sign and name not in {one.machine.name for one in found}:
            raise ConfigError(
                f"--price {text}: {name!r} is not one of the machines; "
                f"{nearest(name, [one.machine.name for one in found])}"
            )
        try:
            value = float(number)
        except ValueError:
            value = float("nan")
        if not 0.0 < value < float("inf"):
            raise ConfigError(f"--price {text}: a price is a number above 0, as in --price h200=5.5")
        found = [_priced(one, value) if not sign or name == one.machine.name else one for one in found]
    return tuple(found)


def _priced(one: Cluster, price: float) -> Cluster:
    facts = {**one.machine.facts, "price": Fact(value=price, source=GIVEN_PRICE)}
    return replace(one, machine=replace(one.machine, facts=facts))


def price_unit(clusters: Sequence[Cluster]) -> tuple[str, str | None]:
    """(unit of the prices, note when some are given and others are from files).

    A file's price is relative to one L20's; a given one is in whatever the caller counts in.
    """
    given = [one.machine.name for one in clusters if _price_source(one) == GIVEN_PRICE]
    filed = [one.machine.name for one in clusters if _price_source(one) not in ("", GIVEN_PRICE)]
    if not given or not filed:
        return "as given" if given else "L20 = 1", None
    return "mixed", (
        f"the price of {' and '.join(given)} is given, that of {' and '.join(filed)} is its file's, where an "
        f"L20 is 1: say --price {filed[0]}=NUMBER in the same unit"
    )


def _price_source(one: Cluster) -> str:
    fact = one.machine.facts.get("price")
    return "" if fact is None else fact.source


def undeclared_format(name: str, model: ModelSpec) -> str | None:
    """What to know when a model's name ends in a format of weights of which its config says nothing."""
    if any(one.format != model.dtype for one in model.stored):
        return None
    match = _NAMED_FORMAT.search(Path(name).name.lower().removesuffix(".json"))
    if match is None:
        return None
    advice = f"--weights {match[1]}" if match[1] in WEIGHT_BITS else "--weights int4"
    return (
        f"the name says {match[1]}, the config says nothing of it, so weights are taken as {model.dtype}; "
        f"give the model's folder with its hf_quant_config.json, or {advice}"
    )


def format_choices(model: ModelSpec, weights: str, kv: str, dispatch: str | None) -> tuple[FormatChoice, ...]:
    """Every combination of formats to search; each argument is one name or several by comma.

    `stored` weights are those of the checkpoint. Without a `dispatch` rows travel as bfloat16, or as fp8
    where the stored experts are fp8: those round their rows to it in any case.

    Raises: ConfigError for an unknown name.
    """
    if dispatch is None:
        dispatch = "fp8" if model.stored_format("routed_experts").format == "fp8" else "bfloat16"
    found = []
    for one, cache, sent in product(
        _names(weights, "weights", (LOSSLESS, *WEIGHT_BITS)), _names(kv, "kv", KV_BITS),
        _names(dispatch, "dispatch", DISPATCH_BITS),
    ):  # fmt: skip
        stored = None if one == LOSSLESS else one
        formats = Formats(
            dense=stored, experts=stored, kv_bits=KV_BITS[cache], dispatch_bits=DISPATCH_BITS[sent]
        )
        found.append(FormatChoice(weights=stored, kv=cache, dispatch=sent, formats=formats))
    return tuple(found)


def _names(text: str, option: str, known: Sequence[str] | dict[str, float]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ConfigError(f"--{option} {name}: unknown format; {nearest(name, known)}")
    if not names:
        raise ConfigError(f"--{option} is empty; {nearest('', known)}")
    return list(dict.fromkeys(names))
