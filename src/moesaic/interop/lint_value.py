"""Whether a flag's value is of its kind and one that the release knows, whatever the other flags are."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from moesaic.interop.command import Command, Option
from moesaic.interop.inventory import TITLES, Flag, Inventory, load, version_key, versions
from moesaic.interop.lint_known import GONE_VALUES, OF_PLUGINS, PLUGIN_FLAGS, SAME_VALUES
from moesaic.interop.lint_line import Finding, Setting, listed
from moesaic.interop.lint_unknown import nearest_word

SHOWN = 12  # values of a list that a message holds


def check_value(
    setting: Setting, option: Option, command: Command, inventory: Inventory, findings: list[Finding]
) -> None:
    """Findings about what follows one flag."""
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
        if not _is_open(text) and not _has_plugin(flag, command):
            found = _of_text(text, setting, option, inventory)
            findings += [] if found is None else [found]


def _has_plugin(flag: Flag, command: Command) -> bool:
    return PLUGIN_FLAGS.get(flag.name) in {option.word for option in command.options}


def _of_text(text: str, setting: Setting, option: Option, inventory: Inventory) -> Finding | None:
    flag = setting.flag
    gone = GONE_VALUES.get((inventory.engine, flag.name, text))
    if gone is not None:
        return Finding(
            flag=option.word, severity="warning", rule="gone-value", message=gone[0], suggestion=gone[1]
        )
    if not _is_known(flag, text, inventory):
        names = flag.choices or flag.known
        plugin = "" if flag.choices else ", or one that a plugin registers"
        near = _nearest_value(text, names)
        had = _had(flag, text, inventory)
        return _wrong(
            option, f"{flag.name} takes {_shown(names)}{plugin}, not {text!r}{had}",
            f"{setting.word} {near}" if near else None, rule="wrong-choice",
        )  # fmt: skip
    if not _fits(flag, text):
        return _wrong(option, f"{flag.name} takes {_kind(flag)}, not {text!r}", None)
    return None


def _is_known(flag: Flag, text: str, inventory: Inventory) -> bool:
    """Whether a value is in the flag's list, or in none that is closed; an import path names a class."""
    names = flag.choices or flag.known
    if not names or text in names:
        return True
    if flag.folds and _folded(text) in {_folded(name) for name in names}:
        return True
    return not flag.choices and ("." in text or text in OF_PLUGINS.get((inventory.engine, flag.name), ()))


def _folded(text: str) -> str:
    return text.lower().replace("-", "_")


def _nearest_value(text: str, names: Sequence[str]) -> str | None:
    """Another word for the same, the same letters with other dashes or capitals, or a misspelling."""
    for same in SAME_VALUES.get(text.lower(), ()):
        if same in names:
            return same
    plain = re.sub(r"[-_. ]", "", text.lower())
    spelt = [name for name in names if re.sub(r"[-_. ]", "", name.lower()) == plain]
    if spelt:
        return spelt[0]
    by_folded = {_folded(name): name for name in names}
    near = nearest_word(_folded(text), by_folded) if len(text) >= 5 else None
    return None if near is None else by_folded[near]


def _had(flag: Flag, text: str, inventory: Inventory) -> str:
    """That an older release took the value."""
    for version in reversed(versions(inventory.engine)):
        if version_key(version) < version_key(inventory.version):
            past = load(inventory.engine, version).find(flag.name)
            if past is not None and text in (*past.choices, *past.known):
                return f" ({TITLES[inventory.engine]} {version} took it)"
    return ""


def _shown(names: Sequence[str]) -> str:
    if len(names) <= SHOWN + 2:
        return listed(names, "or")
    return f"{', '.join(names[:SHOWN])} or {len(names) - SHOWN} others"


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
    if flag.choices or flag.known:
        return _shown(flag.choices or flag.known)
    return {"int": "a whole number", "float": "a number", "json": "a JSON object"}.get(flag.type, "a word")


def merge_json(setting: Setting, option: Option, values: dict[str, Any], findings: list[Finding]) -> None:
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
            near = _nearest_value(key, flag.keys)
            message = f"{flag.name} has no key {key!r}; it has {listed(list(flag.keys))}"
            suggestion = f"{flag.name}.{near}" if near else None
            findings.append(_wrong(option, message, suggestion, rule="unknown-key"))
    merged = values.get(flag.name)
    values[flag.name] = {**merged, **found} if isinstance(merged, dict) else found


def _plain(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text
