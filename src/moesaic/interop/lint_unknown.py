"""What a flag or a variable is that a release does not know: gone, invented, another's, or misspelt.

What is known about a name goes before any guess. A guess needs few edits, word by word, and a flag that takes
a value exactly where one was given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from moesaic.interop.command import Command, Option
from moesaic.interop.inventory import (
    TITLES,
    Flag,
    Inventory,
    choose,
    history,
    load,
    owners,
    version_key,
    versions,
)
from moesaic.interop.lint_gone import GONE_FLAGS, GONE_VARIABLES
from moesaic.interop.lint_known import CONCEPTS, EXPERT_FLAGS, KNOWN_FLAGS, KNOWN_VARIABLES
from moesaic.interop.lint_line import Finding, Severity, listed

PLACEHOLDER = re.compile(r"(?<![\w-])(?:N|F|NAME|MODE|METHOD|PATH|FILE|DIR)(?![\w-])")
PREFIXES = (("VLLM_", "vllm"), ("SGLANG_", "sglang"), ("NCCL_", "nccl"))


def unknown(option: Option, command: Command, inventory: Inventory) -> Finding:
    """A flag that the engine lacks: from the tables, its past, another engine, the nearest."""
    name = option.word if inventory.engine == "trtllm" else inventory.folded(option.word)
    head = name.partition(".")[0]
    found = (
        known_mistake(option.word, head, inventory)
        or _of_program(option, head, command, inventory)
        or _past(option, head, inventory)
    )
    if found is not None:
        return found
    has_value = option.inline is not None or bool(option.after)
    near = nearest_flag(head, has_value, inventory, command.program)
    found = _of_engine(option, head, inventory, near)
    if found is not None:
        return found
    documented = inventory.basis == "documented"
    return Finding(
        flag=option.word, severity=_severity(inventory), rule="unknown-flag", suggestion=near,
        message=f"{inventory.title} has no flag {head}"
        + ("; its documentation may be behind its parser" if documented else ""),
    )  # fmt: skip


def _severity(inventory: Inventory) -> Severity:
    return "warning" if inventory.basis == "documented" else "error"


def known_mistake(word: str, head: str, inventory: Inventory) -> Finding | None:
    """What the tables say about a name that the release does not take."""
    engine = "sglang" if inventory.engine == "kt" else inventory.engine
    known = KNOWN_FLAGS.get((inventory.engine, head)) or KNOWN_FLAGS.get((engine, head))
    if known is not None:
        rule, message, instead = known
        return Finding(
            flag=word, severity="error", rule=rule, message=message, suggestion=_there(instead, inventory)
        )
    table = GONE_FLAGS.get(engine, {})
    gone, there = table.get(head), history(inventory.engine, head)
    if gone is None and head.startswith("--no-") and head.replace("--no-", "--", 1) in table:
        gone = table[head.replace("--no-", "--", 1)][0], None  # what replaced it was for turning it on
    if gone is None or (there and version_key(there[0][0]) > version_key(inventory.version)):
        return None
    why, instead = gone
    if inventory.engine == "trtllm":
        return Finding(
            flag=word, severity="warning", rule="options-file" if instead else "unknown-flag",
            message=f"{inventory.title} has no flag {head}: {why}", suggestion=instead,
        )  # fmt: skip
    instead = _there(instead, inventory)
    before = [v for v, _ in there if version_key(v) < version_key(inventory.version)]
    had = f"{TITLES[inventory.engine]} {before[-1]} had it, {inventory.version} does not; " if before else ""
    return Finding(
        flag=word, severity="error", rule="renamed-flag" if instead else "removed-flag",
        message=f"{word} is gone: {had}{why}", suggestion=instead or "leave it out",
    )  # fmt: skip


def filled(instead: str | None, value: str | None) -> str | None:
    """A new name with the value that the old one had, where one place waits for it."""
    if instead is None or not value or len(PLACEHOLDER.findall(instead)) != 1:
        return instead
    return PLACEHOLDER.sub(lambda _: value, instead)


def _there(instead: str | None, inventory: Inventory) -> str | None:
    """A suggestion, unless it begins with a flag that the release does not have."""
    first = (instead or "").partition(" ")[0].partition(".")[0].partition("=")[0].rstrip(",")
    if first.startswith("--") and inventory.engine != "trtllm" and inventory.find(first) is None:
        return None
    return instead


def _of_program(option: Option, head: str, command: Command, inventory: Inventory) -> Finding | None:
    where = [f for f in inventory.by_name.get(head, ()) if f.programs]
    if not where:
        return None
    programs = listed([program_name(inventory.engine, p) for p in where[0].programs])
    concept = next((c for c in CONCEPTS if head.replace("_", "-") in c.spellings), None)
    return Finding(
        flag=option.word, severity="error", rule="other-program",
        suggestion=concept.by_engine.get(inventory.engine) if concept else None,
        message=f"{head} is a flag of {programs}, not of {program_name(inventory.engine, command.program)}",
    )  # fmt: skip


def _past(option: Option, head: str, inventory: Inventory) -> Finding | None:
    there = history(inventory.engine, head)
    if not there:
        return None
    before = [v for v, _ in there if version_key(v) < version_key(inventory.version)]
    if before:
        return Finding(
            flag=option.word, severity="error", rule="removed-flag",
            suggestion=_there(dict(there)[before[-1]].renamed_to, inventory),
            message=f"{head} is gone: {TITLES[inventory.engine]} {before[-1]} had it, {inventory.version} "
            "does not",
        )  # fmt: skip
    return Finding(
        flag=option.word, severity="error", rule="newer-flag",
        message=f"{inventory.title} has no {head} yet; {there[0][0]} has",
        suggestion=f"run {TITLES[inventory.engine]} {there[0][0]} or newer, or leave it out",
    )  # fmt: skip


def _of_engine(option: Option, head: str, inventory: Inventory, near: str | None) -> Finding | None:
    """A flag of other engines. What merely begins a flag of theirs is a misspelling of a near one here."""
    engine = "sglang" if inventory.engine == "kt" else inventory.engine
    concept = next((c for c in CONCEPTS if head.replace("_", "-") in c.spellings), None)
    own = concept.by_engine.get(engine) if concept else None
    found = owners(head, but=(inventory.engine,))
    others = listed([TITLES[e] for e in found if e != "kt" or len(found) == 1])
    if not others and not own:
        return None
    if near and not own and not any(choose(one).find(head) for one in found):
        return None
    whose = f"that is a flag of {others}" if others else "another spelling of the same"
    return Finding(
        flag=option.word, severity=_severity(inventory), rule="other-engine", suggestion=own,
        message=f"{inventory.title} has no {head}: {whose}"
        + (f"; {TITLES[inventory.engine]} has {own}" if own else ""),
    )  # fmt: skip


def program_name(engine: str, program: str) -> str:
    """How a program of an engine is started."""
    if engine in ("llamacpp", "trtllm"):
        return f"{'llama' if engine == 'llamacpp' else 'trtllm'}-{program}"
    return f"{TITLES[engine]} {program}"


# --- guesses


def nearest_flag(head: str, has_value: bool, inventory: Inventory, program: str) -> str | None:
    """The one name that a misspelt flag is near to, of the same kind: with a value, or without."""

    def fits(flag: Flag) -> bool:
        is_either = flag.optional or flag.many or flag.type == "value_or_bool"
        is_of = not flag.programs or program in flag.programs
        return is_of and not flag.removed and (is_either or flag.takes_value == has_value)

    return nearest_word(head, (n for n, flags in inventory.by_name.items() if any(map(fits, flags))))


def nearest_word(word: str, names: Iterable[str]) -> str | None:
    """The only name a few letters away, if its parts between dashes are those of the word; else None."""
    parts = _parts(word)
    most = min(len("".join(parts)) // 4, 3) or 1
    near: dict[int, list[str]] = {}
    for name in names:
        if abs(len(name) - len(word)) > most:
            continue
        edits = _edits(word, name)
        if edits <= most and (edits <= 1 or _is_same(parts, _parts(name))):
            near.setdefault(edits, []).append(name)
    best = near[min(near)] if near else []
    return best[0] if len(best) == 1 else None


def _parts(name: str) -> list[str]:
    return name.lstrip("-").lower().replace("_", "-").split("-")


def _is_same(typed: list[str], meant: list[str]) -> bool:
    """Whether each part is a cut or a misspelling of its own counterpart."""
    return len(typed) == len(meant) and all(
        (min(len(one), len(other)) >= 3 and (one.startswith(other) or other.startswith(one)))
        or _edits(one, other) <= max(len(other) // 4, one == other)
        for one, other in zip(typed, meant, strict=True)
    )


def _edits(one: str, other: str) -> int:
    """Letters to put in, take out, change, or swap with the next."""
    before, row = [0] * (len(other) + 1), list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        last, before, row = before, row, [i]
        for j, b in enumerate(other, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return row[-1]


# --- variables


def variables(command: Command, inventory: Inventory | None) -> Iterator[Finding]:
    """Variables that are unknown, renamed or without effect."""
    words = {option.word for option in command.options}
    is_all_to_all = inventory is None or command.program == "alltoall" or bool(words & EXPERT_FLAGS)
    for name in command.env:
        known = KNOWN_VARIABLES.get(name)
        if known is not None:
            engine, severity, rule, message, suggestion = known
            fits = engine is None or (inventory is not None and inventory.engine == engine)
            if fits and (rule != "no-effect-on-all-to-all" or is_all_to_all):
                yield Finding(flag=name, severity=severity, rule=rule, message=message, suggestion=suggestion)
            continue
        for prefix, engine in PREFIXES:
            if not name.startswith(prefix):
                continue
            own = inventory if inventory is not None and inventory.engine == engine else choose(engine)
            if name not in own.env:
                yield _unknown_variable(name, command.env[name], own)
        if inventory is not None and inventory.engine == "sglang" and name.startswith("SGL_"):
            yield from _old_prefix(name, command.env[name], inventory)


def _old_prefix(name: str, value: str, own: Inventory) -> Iterator[Finding]:
    """SGLang's variables began with SGL_; it sets the new name from the old one, and warns."""
    now = name.replace("SGL_", "SGLANG_", 1)
    if name not in own.env and now in own.env:
        yield Finding(
            flag=name, severity="warning", rule="deprecated-variable", suggestion=f"{now}={value}",
            message=f"{own.title} still takes {name} for {now}, and calls it deprecated",
        )  # fmt: skip


def _unknown_variable(name: str, value: str, own: Inventory) -> Finding:
    older = [v for v in versions(own.engine) if version_key(v) < version_key(own.version)]
    had = next((v for v in reversed(older) if name in load(own.engine, v).env), None)
    why, instead = GONE_VARIABLES.get(name, ("", None))
    instead = filled(_there(instead, own), value)
    if why or had is not None:
        since = (
            f"{TITLES[own.engine]} {had} read it, {own.version} does not"
            if had
            else f"{own.title} ignores it"
        )
        return Finding(
            flag=name, severity="error" if instead else "warning",
            rule="renamed-variable" if instead else "removed-variable",
            message=f"{name} was removed: {since}" + (f"; {why}" if why else ""),
            suggestion=instead or "leave it out",
        )  # fmt: skip
    near = nearest_word(name, [*own.env, *GONE_VARIABLES])
    if near is not None and near in GONE_VARIABLES:
        near = filled(_there(GONE_VARIABLES[near][1], own), value)
    return Finding(
        flag=name, severity="warning", rule="unknown-variable", suggestion=near,
        message=f"{own.title} reads no variable {name}: it is ignored",
    )  # fmt: skip
