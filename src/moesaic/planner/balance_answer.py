"""A balance as JSON values: stable keys, the whole answer."""

from __future__ import annotations

import dataclasses
from typing import Any

from moesaic.planner.balance import Balance, Formulas, Outcome
from moesaic.planner.balance_check import Difference, Finding


def as_json(found: Balance) -> dict[str, Any]:
    """The answer; `policies` by name, `layers` of the chosen one."""
    case = found.case
    return {
        "loads": [dump.source for dump in case.dumps],
        "holdouts": [dump.source for dump in case.holdouts],
        "gpus": case.num_gpus,
        "nodes": case.num_nodes,
        "slots": found.num_slots,
        "experts": found.loads_SLE.shape[2],
        "sparse_layers": list(found.layer_idxs),
        "dense_layers": len(case.dumps[0].counts_LE) - len(case.dumps[0].sparse_rows),
        "zero_steps": sum(dump.num_zero_steps for dump in case.dumps),
        "policies": {one.name: _outcome(one) for one in found.outcomes},
        "unfit": dict(found.unfit),
        "chosen": found.chosen,
        "formulas": {"before": _plain(found.formulas_before), "after": _plain(found.formulas_after)},
        "memory": None
        if found.memory is None
        else dataclasses.asdict(found.memory) | {"sequences_lost": found.memory.sequences_lost},
        "layers": [
            {"layer": idx, "before": before.round(6).tolist(), "after": after.round(6).tolist()}
            for idx, before, after in zip(found.layer_idxs, found.before, found.after, strict=True)
        ],
    }


def _outcome(one: Outcome) -> dict[str, Any]:
    return {
        field.name: getattr(one, field.name)
        for field in dataclasses.fields(one)
        if field.name not in ("name", "placement")
    }


def _plain(formulas: Formulas) -> dict[str, float]:
    return dataclasses.asdict(formulas)


def check_json(source: str, findings: tuple[Finding, ...]) -> dict[str, Any]:
    """What a check found."""
    return {
        "source": source,
        "is_sound": all(one.level != "fault" for one in findings),
        "findings": [dataclasses.asdict(one) for one in findings],
    }


def diff_json(found: Difference) -> dict[str, Any]:
    """What changed between two loads."""
    return dataclasses.asdict(found) | {"loss": found.loss}
