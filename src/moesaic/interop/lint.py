"""What is wrong with a launch line: unknown and renamed flags, values of the wrong kind, bad company.

Reads text against the inventories; starts nothing. The tables of known mistakes and the rules about
combinations are in the modules beside this one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from moesaic.errors import ConfigError
from moesaic.interop.command import Command, Option, read_commands
from moesaic.interop.inventory import (
    TITLES,
    Flag,
    Inventory,
    choose,
    history,
    owners,
    version_key,
)
from moesaic.interop.lint_known import (
    CONCEPTS,
    EXPERT_FLAGS,
    GONE_VALUES,
    KNOWN_FLAGS,
    KNOWN_PROGRAMS,
    KNOWN_TEXT,
    KNOWN_VARIABLES,
)
from moesaic.interop.lint_line import Finding, Line, Setting, Severity
from moesaic.interop.lint_rules import check_line


@dataclass(frozen=True, kw_only=True, slots=True)
class LineReport:
    """The findings of one line. `version` is the inventory's; `asked` the one that was wanted."""

    engine: str
    program: str
    version: str | None
    asked: str | None
    basis: str | None
    model: str | None
    findings: tuple[Finding, ...]

    @property
    def is_failed(self) -> bool:
        """Whether a finding is an error."""
        return any(one.severity == "error" for one in self.findings)


def lint(text: str, *, version: str | None = None, model: str | None = None) -> tuple[LineReport, ...]:
    """One report a line that starts an engine or a known tool. `model` is a preset or path for its facts.

    Raises: ConfigError when the text holds no such line, for quotes that do not close, and for a version that
            is no number.
    """
    reports = [*_text_reports(text)]
    commands = read_commands(text)
    for command in commands:
        if command.engine is not None:
            reports.append(_lint_command(command, command.engine, version, model, text))
        elif (
            command.program in KNOWN_PROGRAMS
            or command.program.startswith("-")
            or any(word.rpartition("/")[2] in KNOWN_PROGRAMS for word in command.words)
        ):
            reports.append(_odd_program(command))
    if not reports:
        shown = ", ".join(sorted({command.program for command in commands})) or "nothing"
        raise ConfigError(
            f"no launch line of a known engine, only {shown}; lint reads vllm serve, python -m "
            "vllm.entrypoints.openai.api_server, sglang serve, python -m sglang.launch_server, trtllm-serve, "
            "llama-server, llama-cli, kt run, docker run of their images, and nccl-tests' *_perf"
        )
    return tuple(reports)


def _text_reports(text: str) -> Iterator[LineReport]:
    for pattern, name, severity, rule, message, suggestion in KNOWN_TEXT:
        if re.search(pattern, text):
            found = Finding(flag=name, severity=severity, rule=rule, message=message, suggestion=suggestion)
            yield LineReport(
                engine="", program="python", version=None, asked=None, basis=None, model=None,
                findings=(found,),
            )  # fmt: skip


def _odd_program(command: Command) -> LineReport:
    names = [word.rpartition("/")[2] for word in (command.program, *command.words)]
    name = next((n for n in names if n in KNOWN_PROGRAMS), None)
    if name is None:
        finding = Finding(
            flag=command.program, severity="error", rule="cut-line",
            message=f"a command begins with {command.program}: the line before it has no backslash at its "
            "end, or a comment or a blank behind the backslash",
            suggestion="end every line but the last with a backslash, and put comments above the command",
        )  # fmt: skip
    else:
        finding = Finding(
            flag=name,
            severity="error",
            rule="unknown-program",
            message=KNOWN_PROGRAMS[name][0],
            suggestion=KNOWN_PROGRAMS[name][1],
        )
    return LineReport(
        engine="", program=name or command.program, version=None, asked=None, basis=None, model=None,
        findings=(finding, *_variables(command, None)),
    )  # fmt: skip


def _lint_command(
    command: Command, engine: str, version: str | None, model: str | None, text: str
) -> LineReport:
    asked = version or command.image_version
    inventory = choose(engine, asked)
    findings: list[Finding] = []
    settings: list[Setting] = []
    values: dict[str, Any] = {}
    stray = list(command.leading[_places(command) :])
    for option in command.options:
        setting = _resolve(option, command, inventory, findings)
        if setting is None:
            continue
        settings.append(setting)
        _check_value(setting, option, command, findings)
        _merge_json(setting, option, values, findings)
        stray += _stray(setting, option)
    if stray:
        findings.append(
            Finding(
                flag=stray[0], severity="error", rule="stray-word",
                message=f"{_list(stray[:3])} belongs to no flag: a dash or an equals sign is missing, or a "
                "value is not quoted",
            )
        )  # fmt: skip
    line = Line(command=command, inventory=inventory, settings=tuple(settings), json_values=values)
    findings += [*_variables(command, inventory), *check_line(line, model, text)]
    return LineReport(
        engine=engine, program=command.program, version=inventory.version, asked=asked,
        basis=inventory.basis, model=line.model, findings=tuple(dict.fromkeys(findings)),
    )  # fmt: skip


# --- one flag


def _resolve(
    option: Option, command: Command, inventory: Inventory, findings: list[Finding]
) -> Setting | None:
    """The flag that a word means; None with a finding for one that the engine does not know."""
    word, program = inventory.folded(option.word), command.program
    head, dot, _ = word.partition(".")
    name = head if dot and inventory.engine == "vllm" else word
    if inventory.engine == "vllm" and re.fullmatch(r"-O\d?", word):
        return None
    flag = inventory.find(name, program)
    if flag is not None and flag.programs and program not in flag.programs:
        flag = None
    if flag is None:
        found = inventory.beginning_with(name, program)
        if len(found) == 1:
            flag = found[0]
        elif found:
            findings.append(
                Finding(
                    flag=option.word, severity="error", rule="ambiguous-flag",
                    message=f"{option.word} may be {_list([f.name for f in found], 'or')}: an abbreviation "
                    "has to be the beginning of one name only",
                    suggestion=found[0].name,
                )
            )  # fmt: skip
            return None
    if flag is None:
        findings.append(_unknown(option, command, inventory))
        return None
    if flag.deprecated:
        findings.append(_deprecated(option, flag, inventory))
    value = option.inline if option.inline is not None else (option.after[0] if option.after else None)
    is_bare = flag.type == "bool" or (flag.optional and value is None)
    return Setting(flag=flag, word=option.word, value=None if is_bare else value, is_off=name in flag.off)


def _deprecated(option: Option, flag: Flag, inventory: Inventory) -> Finding:
    known = KNOWN_FLAGS.get((inventory.engine, flag.name))
    instead = (known[2] if known else None) or flag.renamed_to
    return Finding(
        flag=option.word, severity="warning", rule="deprecated-flag",
        message=f"{inventory.title} still takes {flag.name}, and calls it deprecated",
        suggestion=instead,
    )  # fmt: skip


def _unknown(option: Option, command: Command, inventory: Inventory) -> Finding:
    """A flag that the engine lacks: from the table of known ones, its past, another engine, the nearest."""
    name = option.word if inventory.engine == "trtllm" else inventory.folded(option.word)
    head = name.partition(".")[0]
    documented = inventory.basis == "documented"
    severity: Severity = "warning" if documented else "error"
    engine = "sglang" if inventory.engine == "kt" else inventory.engine
    known = KNOWN_FLAGS.get((inventory.engine, head)) or KNOWN_FLAGS.get((engine, head))
    if known is not None:
        rule, message, suggestion = known
        return Finding(flag=option.word, severity="error", rule=rule, message=message, suggestion=suggestion)
    where = [f for f in inventory.by_name.get(head, ()) if f.programs]
    if where:
        programs = _list([f"{_program(inventory.engine, p)}" for p in where[0].programs])
        return Finding(
            flag=option.word, severity="error", rule="other-program",
            message=f"{head} is a flag of {programs}, not of {_program(inventory.engine, command.program)}",
        )  # fmt: skip
    past = _past(option, head, inventory)
    if past is not None:
        return past
    concept = next((c for c in CONCEPTS if head in c.spellings), None)
    own = concept.by_engine.get(engine) if concept else None
    found = owners(head, but=(inventory.engine,))
    others = _list([TITLES[e] for e in found if e != "kt" or len(found) == 1])
    if others or own:
        whose = f"that is a flag of {others}" if others else "another spelling of the same"
        return Finding(
            flag=option.word, severity=severity, rule="other-engine", suggestion=own,
            message=f"{inventory.title} has no {head}: {whose}"
            + (f"; {TITLES[inventory.engine]} has {own}" if own else ""),
        )  # fmt: skip
    close = get_close_matches(head, list(inventory.by_name), n=1, cutoff=0.7)
    return Finding(
        flag=option.word, severity=severity, rule="unknown-flag", suggestion=close[0] if close else None,
        message=f"{inventory.title} has no flag {head}"
        + ("; its documentation may be behind its parser" if documented else ""),
    )  # fmt: skip


def _past(option: Option, head: str, inventory: Inventory) -> Finding | None:
    there = history(inventory.engine, head)
    if not there:
        return None
    before = [v for v, _ in there if version_key(v) < version_key(inventory.version)]
    if before:
        last, flag = before[-1], dict(there)[before[-1]]
        instead = flag.renamed_to or next(
            iter(get_close_matches(head, list(inventory.by_name), n=1, cutoff=0.8)), None
        )
        return Finding(
            flag=option.word, severity="error", rule="removed-flag", suggestion=instead,
            message=f"{head} is gone: {TITLES[inventory.engine]} {last} had it, {inventory.version} does not",
        )  # fmt: skip
    return Finding(
        flag=option.word, severity="error", rule="newer-flag",
        message=f"{inventory.title} has no {head} yet; {there[0][0]} has",
        suggestion=f"run {TITLES[inventory.engine]} {there[0][0]} or newer, or leave it out",
    )  # fmt: skip


# --- its value


def _check_value(setting: Setting, option: Option, command: Command, findings: list[Finding]) -> None:
    flag, value = setting.flag, setting.value
    if flag.type == "bool":
        if option.inline is not None and command.engine != "trtllm":
            findings.append(_wrong(option, f"{flag.name} is a switch and takes no value", setting.word))
        return
    if value is None:
        if not flag.optional:
            example = f"{setting.word} {flag.choices[0]}" if flag.choices else None
            findings.append(_wrong(option, f"{flag.name} needs a value ({_kind(flag)})", example))
        return
    texts = (value, *option.after[1:]) if flag.many and option.inline is None else (value,)
    for text in texts:
        if _is_open(text):
            continue
        gone = GONE_VALUES.get((command.engine or "", flag.name, text))
        if gone is not None:
            findings.append(
                Finding(
                    flag=option.word,
                    severity="warning",
                    rule="gone-value",
                    message=gone[0],
                    suggestion=gone[1],
                )
            )
        elif flag.choices and text not in flag.choices:
            close = get_close_matches(text, flag.choices, n=1, cutoff=0.5)
            findings.append(
                _wrong(
                    option,
                    f"{flag.name} takes {_list(list(flag.choices), 'or')}, not {text!r}",
                    f"{setting.word} {close[0]}" if close else None,
                    rule="wrong-choice",
                )
            )
        elif not _fits(flag, text):
            findings.append(_wrong(option, f"{flag.name} takes {_kind(flag)}, not {text!r}", None))


def _wrong(option: Option, message: str, suggestion: str | None, rule: str = "wrong-value") -> Finding:
    return Finding(flag=option.word, severity="error", rule=rule, message=message, suggestion=suggestion)


def _is_open(text: str) -> bool:
    """Whether a shell variable or a placeholder stands where a value would."""
    return "$" in text or "`" in text or bool(re.fullmatch(r"[<{\[].*[>\]]|\{\{.*", text)) or "..." in text


def _fits(flag: Flag, text: str) -> bool:
    if flag.type == "int":
        # Sizes such as 32k, and auto, are read by some parsers; both are harmless to let through.
        return bool(re.fullmatch(r"[+-]?\d+|\d+(?:\.\d+)?[kKmMgGtT]i?|auto|[\d,]+", text))
    if flag.type == "float":
        return bool(re.fullmatch(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", text))
    return True


def _kind(flag: Flag) -> str:
    if flag.choices:
        return _list(list(flag.choices), "or")
    return {"int": "a whole number", "float": "a number", "json": "a JSON object"}.get(flag.type, "a word")


def _merge_json(setting: Setting, option: Option, values: dict[str, Any], findings: list[Finding]) -> None:
    """Read a JSON value, or one key of it from `--eplb-config.window_size 500`."""
    flag, value = setting.flag, setting.value
    if flag.type != "json" or value is None or _is_open(value):
        return
    path = option.word.partition(".")[2]
    if path:
        found: Any = _plain(value)
        for key in reversed(path.rstrip("+").split(".")):
            found = {key: found}
    else:
        try:
            found = json.loads(value)
        except ValueError as error:
            hint = "quote it once, with single quotes outside and double quotes inside"
            findings.append(_wrong(option, f"{flag.name}: not valid JSON ({error}): {value!r}", hint))
            return
    if not isinstance(found, dict):
        if flag.keys:
            findings.append(_wrong(option, f"{flag.name} takes a JSON object, not {value!r}", None))
        return
    for key in found:
        if flag.keys and key not in flag.keys:
            close = get_close_matches(key, flag.keys, n=1, cutoff=0.5)
            findings.append(
                _wrong(
                    option,
                    f"{flag.name} has no key {key!r}; it has {_list(list(flag.keys))}",
                    f"{flag.name}.{close[0]}" if close else None,
                    rule="unknown-key",
                )
            )
    merged = values.get(flag.name)
    values[flag.name] = {**merged, **found} if isinstance(merged, dict) else found


def _plain(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text


def _places(command: Command) -> int:
    """Words that may stand before the first flag: the model, or llama-cli's none."""
    if command.engine in ("vllm", "sglang", "trtllm", "kt") and command.program != "launch_server":
        return 1
    return 0


def _stray(setting: Setting, option: Option) -> tuple[str, ...]:
    """Words behind a flag's value that belong to no flag."""
    flag = setting.flag
    if flag.many or flag.type == "value_or_bool":
        return ()
    return option.after[0 if flag.type == "bool" or option.inline is not None else flag.values :]


# --- variables


def _variables(command: Command, inventory: Inventory | None) -> Iterator[Finding]:
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
        for prefix, engine in (("VLLM_", "vllm"), ("SGLANG_", "sglang"), ("NCCL_", "nccl")):
            if not name.startswith(prefix):
                continue
            own = inventory if inventory is not None and inventory.engine == engine else choose(engine)
            if name in own.env:
                continue
            close = get_close_matches(name, list(own.env), n=1, cutoff=0.8)
            yield Finding(
                flag=name, severity="warning", rule="unknown-variable",
                suggestion=close[0] if close else None,
                message=f"{own.title} reads no variable {name}: it is ignored",
            )  # fmt: skip


def _program(engine: str, program: str) -> str:
    if engine == "llamacpp":
        return f"llama-{program}"
    if engine == "trtllm":
        return f"trtllm-{program}"
    return f"{TITLES[engine]} {program}"


def _list(items: list[str], word: str = "and") -> str:
    if len(items) <= 1:
        return "".join(items)
    return f"{', '.join(items[:-1])} {word} {items[-1]}"
