"""What a model's sizes allow an engine to divide by: heads, experts, blocks of quantised weights, context.

One place for the rules that launch lines and emitted deployments are checked by.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moesaic.account.memory import scale_block
from moesaic.spec.model import GqaSpec, MlaSpec, ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A division that does not come out, with the arithmetic and what would."""

    rule: str
    message: str
    suggestion: str


def problems(
    model: ModelSpec,
    *,
    tp: int = 1,
    ep: int = 1,
    expert_tp: int = 1,
    num_redundant: int | None = None,
    kvp: int = 1,
) -> Iterator[Problem]:
    """Every division of a layout that a model does not allow.

    `num_redundant` None: experts are not copied, and a rank may hold one expert more than another.
    """
    yield from _heads(model, tp)
    if kvp > 1 and tp % kvp:
        yield Problem(
            rule="context-parallel-divides", suggestion=_choices("context parallel", tp),
            message=f"tensor parallel {tp} / context parallel {kvp} = {tp / kvp:.2f}, and must be whole",
        )  # fmt: skip
    moes = [moe for _, moe in model.moe_layers]
    for experts in sorted({moe.num_experts for moe in moes}):
        yield from _experts(experts, ep, num_redundant)
    for width in sorted({moe.expert_width for moe in moes}):
        yield from _blocks(model, width, expert_tp)


def _heads(model: ModelSpec, tp: int) -> Iterator[Problem]:
    for number in _head_counts(model):
        if number % tp:
            yield Problem(
                rule="heads-divide", suggestion=_choices("tensor parallel", number, near=tp),
                message=f"{number} attention heads / {tp} = {number / tp:.2f}, and must be whole",
            )  # fmt: skip
            return


def _head_counts(model: ModelSpec) -> list[int]:
    mixers = [layer.mixer for layer in model.layers]
    return sorted({mixer.num_heads for mixer in mixers if isinstance(mixer, GqaSpec | MlaSpec)})


def _experts(experts: int, ep: int, num_redundant: int | None) -> Iterator[Problem]:
    if ep > experts and not num_redundant:
        yield Problem(
            rule="experts-per-rank", suggestion=f"expert parallel of at most {experts}, or redundant experts",
            message=f"{experts} experts on {ep} ranks leave {ep - experts} ranks without any",
        )  # fmt: skip
    elif num_redundant is not None and (experts + num_redundant) % ep:
        slots = experts + num_redundant
        fit = -slots % ep + num_redundant
        below = num_redundant - slots % ep
        near = f"{fit} redundant experts" + (f", or {below}" if below >= 0 else "")
        yield Problem(
            rule="slots-divide", suggestion=near,
            message=f"{experts} experts + {num_redundant} redundant = {slots} slots / {ep} ranks = "
            f"{slots / ep:.2f}, and must be whole",
        )  # fmt: skip


def _blocks(model: ModelSpec, width: int, expert_tp: int) -> Iterator[Problem]:
    block, stored, heads = scale_block(model), model.weight_format, _head_counts(model)
    if block == 1 or expert_tp == 1:
        return
    if width % expert_tp or (width // expert_tp) % block:
        fits = [
            d for d in range(1, expert_tp)
            if width % (d * block) == 0 and all(number % d == 0 for number in heads)
        ]  # fmt: skip
        yield Problem(
            rule="blocks-divide",
            message=f"an expert of width {width} over {expert_tp} ranks is {width / expert_tp:g} wide, no "
            f"multiple of the {block} weights that share a scale in {stored}",
            suggestion="expert parallelism, which keeps experts whole"
            + (f", or tensor parallel {fits[-1]}" if fits and fits[-1] > 1 else ""),
        )  # fmt: skip


def _choices(what: str, number: int, near: int | None = None) -> str:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    if near is not None:
        below = [d for d in divisors if d <= near][-1:]
        above = [d for d in divisors if d >= near][:1]
        divisors = sorted({*below, *above})
    return f"{what} {' or '.join(map(str, divisors))}"
