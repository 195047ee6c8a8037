"""What is wrong with a launch line: unknown and renamed flags, values of the wrong kind, bad company.

Reads text against the inventories; starts nothing. The tables of known mistakes, what unknown names are, what
values fit, and the rules about combinations are in the modules beside this one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moesaic.errors import ConfigError
from moesaic.interop.command import Command, Option, read_commands
from moesaic.interop.inventory import Flag, Inventory, choose
from moesaic.interop.lint_known import KNOWN_PROGRAMS, KNOWN_TEXT
from moesaic.interop.lint_line import Finding, Line, Setting, listed
from moesaic.interop.lint_rules import check_line
from moesaic.interop.lint_unknown import filled, known_mistake, unknown, variables
from moesaic.interop.lint_value import check_value, merge_json

OwnOptions = Callable[[Sequence[str]], Inventory]
"""The inventory of our own command line: of the words behind `moesaic`."""


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


def lint(
    text: str, *, version: str | None = None, model: str | None = None, own: OwnOptions | None = None
) -> tuple[LineReport, ...]:
    """One report a line that starts an engine or a known tool. `model` is a preset or path for its facts.

    `own` says which options our own command line has; lines of it are unknown without.

    Raises: ConfigError when the text holds no such line, for quotes that do not close, and for a version that
            is no number.
    """
    reports = [*_text_reports(text)]
    commands = read_commands(text)
    for command in commands:
        if command.engine == "moesaic":
            if own is not None:
                reports.append(_own_report(command, own, model, text))
        elif command.engine is not None:
            asked = version or command.image_version
            inventory = choose(command.engine, asked)
            reports.append(_lint_command(command, inventory, asked, model, text))
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
            "llama-server, llama-cli, kt run, moesaic, docker run of their images, and nccl-tests' *_perf"
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
        findings=(finding, *variables(command, None)),
    )  # fmt: skip


def _own_report(command: Command, own: OwnOptions, model: str | None, text: str) -> LineReport:
    try:
        inventory = own((command.program, *command.leading))
    except ConfigError as error:
        found = Finding(flag=command.program, severity="error", rule="unknown-program", message=str(error))
        return LineReport(
            engine="moesaic", program=command.program, version=None, asked=None, basis=None, model=None,
            findings=(found,),
        )  # fmt: skip
    return _lint_command(command, inventory, None, model, text)


def _lint_command(
    command: Command, inventory: Inventory, asked: str | None, model: str | None, text: str
) -> LineReport:
    command = _nested(command, inventory)
    findings: list[Finding] = []
    settings: list[Setting] = []
    values: dict[str, Any] = {}
    places = _places(command, inventory)
    stray = list(command.leading[places:])
    for option in command.options:
        setting = _resolve(option, command, inventory, findings)
        if setting is None:
            continue
        settings.append(setting)
        check_value(setting, option, command, inventory, findings)
        merge_json(setting, option, values, findings)
        stray += _stray(setting, option)
    if inventory.places:  # whose words may stand behind flags too
        words = (*command.leading, *(word for word in stray if word not in command.leading))
        command, stray = replace(command, leading=words[:places]), list(words[places:])
    if stray:
        findings.append(
            Finding(
                flag=stray[0], severity="error", rule="stray-word",
                message=f"{listed(stray[:3])} belongs to no flag: a dash or an equals sign is missing, or a "
                "value is not quoted",
            )
        )  # fmt: skip
    line = Line(command=command, inventory=inventory, settings=tuple(settings), json_values=values)
    findings += [*variables(command, inventory), *check_line(line, model, text)]
    return LineReport(
        engine=inventory.engine, program=command.program, version=inventory.version, asked=asked,
        basis=inventory.basis, model=line.model, findings=tuple(dict.fromkeys(findings)),
    )  # fmt: skip


def _nested(command: Command, inventory: Inventory) -> Command:
    """A verb of two words as one program."""
    program = " ".join([command.program, *command.leading[:1]])
    if any(program in flag.programs for flag in inventory.flags):
        return replace(command, program=program, leading=command.leading[1:])
    return command


# --- one flag


def _resolve(
    option: Option, command: Command, inventory: Inventory, findings: list[Finding]
) -> Setting | None:
    """The flag that a word means; None with a finding for one that the engine does not know."""
    word, program = inventory.folded(option.word), command.program
    head, dot, _ = word.partition(".")
    name = head if dot and inventory.engine == "vllm" else word
    flag = inventory.find(name, program)
    if flag is not None and flag.programs and program not in flag.programs:
        flag = None
    if flag is None and inventory.engine == "vllm" and re.fullmatch(r"-O\w*", word):
        findings += _optimization(option)
        return None
    if flag is None or flag.removed:
        mistake = known_mistake(option.word, name if flag is None else flag.name, inventory)
        if mistake is not None:
            value = option.inline if option.inline is not None else next(iter(option.after), None)
            is_same = mistake.rule == "renamed-flag"
            instead = filled(mistake.suggestion, value) if is_same else mistake.suggestion
            findings.append(replace(mistake, suggestion=instead))
            return None
    if flag is None:
        found = inventory.beginning_with(name, program)
        flag = found[0] if len(found) == 1 else None
        if len(found) > 1:
            findings.append(_ambiguous(option, found))
            return None
    if flag is None:
        findings.append(unknown(option, command, inventory))
        return None
    if flag.deprecated:
        findings.append(_deprecated(option, flag, inventory))
    value = option.inline if option.inline is not None else (option.after[0] if option.after else None)
    is_bare = flag.type == "bool" or (flag.optional and value is None)
    return Setting(flag=flag, word=option.word, value=None if is_bare else value, is_off=name in flag.off)


def _optimization(option: Option) -> list[Finding]:
    """`-O3` and `-O 3` are levels; an object of settings, which -O took once, has a flag of its own."""
    value = option.inline or (option.after[0] if option.after else "")
    if not value.startswith("{"):
        return []
    return [
        Finding(
            flag="-O", severity="error", rule="renamed-flag",
            message="-O takes a level, 0 to 3; an object of settings is --compilation-config now",
            suggestion=f"--compilation-config '{value}'",
        )
    ]  # fmt: skip


def _ambiguous(option: Option, found: Sequence[Flag]) -> Finding:
    names = [flag.name for flag in found[:6]] + ([f"{len(found) - 6} others"] if len(found) > 6 else [])
    return Finding(
        flag=option.word, severity="error", rule="ambiguous-flag",
        message=f"{option.word} may be {listed(names, 'or')}: an abbreviation has to be the beginning of one "
        "name only",
    )  # fmt: skip


def _deprecated(option: Option, flag: Flag, inventory: Inventory) -> Finding:
    mistake = known_mistake(option.word, flag.name, inventory)
    instead = (mistake.suggestion if mistake else None) or flag.renamed_to
    return Finding(
        flag=option.word, severity="warning", rule="deprecated-flag",
        message=f"{inventory.title} still takes {flag.name}, and calls it deprecated",
        suggestion=instead,
    )  # fmt: skip


def _places(command: Command, inventory: Inventory) -> int:
    """Words that may stand before the first flag: the model, or llama-cli's none."""
    if inventory.places:
        return inventory.places.get(command.program, 0)
    if command.engine in ("vllm", "sglang", "trtllm", "kt") and command.program != "launch_server":
        return 1
    return 0


def _stray(setting: Setting, option: Option) -> tuple[str, ...]:
    """Words behind a flag's value that belong to no flag."""
    flag = setting.flag
    if flag.many or flag.type == "value_or_bool":
        return ()
    return option.after[0 if flag.type == "bool" or option.inline is not None else flag.values :]
