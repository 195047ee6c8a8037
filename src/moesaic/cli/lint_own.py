"""Our own command line as an inventory of flags, read from the options of each verb."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import typer

from moesaic import __version__
from moesaic.errors import ConfigError, nearest
from moesaic.interop.inventory import Flag, Inventory


def own_inventory(words: Sequence[str]) -> Inventory:
    """The flags of the verb that the words begin with; of one with verbs of its own, of each of them.

    Raises: ConfigError for a verb that there is not.
    """
    from moesaic.cli.main import VERBS, build_app  # which imports every verb, this one too

    verb = words[0]
    if verb not in {one.name for one in VERBS}:
        raise ConfigError(f"moesaic has no verb {verb!r}; {nearest(verb, [one.name for one in VERBS])}")
    top: Any = typer.main.get_command(build_app(verb))
    inner = getattr(top.commands[verb], "commands", None)
    if inner is not None and (len(words) < 2 or words[1] not in inner):
        typed = words[1] if len(words) > 1 else ""
        raise ConfigError(f"moesaic {verb} has no verb {typed!r}; {nearest(typed, list(inner))}")
    flags: list[Flag] = []
    places: dict[str, int] = {}
    for program, command in _commands(verb, top.commands[verb]):
        named = [one for one in command.params if one.param_type_name == "argument"]
        places[program] = 1000 if any(one.nargs < 0 for one in named) else sum(one.nargs for one in named)
        flags += [_flag(one, program) for one in command.params if one.param_type_name == "option"]
        flags.append(Flag(name="--help", aliases=("-h",), type="bool", programs=(program,)))
    return Inventory(
        engine="moesaic", version=__version__, source="the options of moesaic", basis="parser",
        flags=tuple(flags), env={}, places=places,
    )  # fmt: skip


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, command
        return
    for word, one in inner.items():
        yield from _commands(f"{name} {word}", one)


def _flag(option: Any, program: str) -> Flag:
    long = next((name for name in option.opts if name.startswith("--")), option.opts[0])
    kind = {"int": "int", "flo": "float"}
    return Flag(
        name=long, aliases=tuple(name for name in option.opts if name != long),
        off=tuple(option.secondary_opts), programs=(program,), values=option.nargs,
        type="bool" if option.is_flag or option.count else kind.get(option.type.name[:3], "str"),
        choices=tuple(map(str, getattr(option.type, "choices", ()))),
    )  # fmt: skip
