"""Which flags and variables each release of another engine knows, from the files in `flags/`.

Facts read from the released parsers by `scripts/flags.py`. What a flag does, and which goes with which, is
not known here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from moesaic.errors import ConfigError, nearest

FOLDER = Path(__file__).parent / "flags"
Engine = Literal["vllm", "sglang", "trtllm", "llamacpp", "kt"]
ENGINES: tuple[Engine, ...] = ("vllm", "sglang", "trtllm", "llamacpp", "kt")
TITLES: Mapping[str, str] = {
    "vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM", "llamacpp": "llama.cpp",
    "kt": "KTransformers", "nccl": "NCCL", "nccltests": "nccl-tests", "moesaic": "moesaic",
}  # fmt: skip
FOLDING = ("vllm", "llamacpp")  # their parsers read underscores of a name as dashes
PREFIXING = ("vllm", "sglang", "kt")  # argparse: an unambiguous beginning of a name is that name


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One option of a parser."""

    name: str
    type: str  # bool takes no value; int, float, str, json, value_or_bool
    aliases: tuple[str, ...] = ()
    off: tuple[str, ...] = ()  # names that switch it off
    choices: tuple[str, ...] = ()
    known: tuple[str, ...] = ()  # values of the release itself, where plugins may register more
    folds: bool = False  # a value is compared without its case, and with dashes as underscores
    keys: tuple[str, ...] = ()  # of the JSON object that it takes; empty: not known
    many: bool = False  # takes every word up to the next flag
    optional: bool = False  # its value may be left out
    values: int = 1
    default: Any = None  # None: none, or computed
    deprecated: bool = False
    removed: bool = False  # still parsed, and refused by name
    renamed_to: str | None = None
    programs: tuple[str, ...] = ()  # empty: all of the engine's

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that may be typed for it."""
        return (self.name, *self.aliases, *self.off)

    @property
    def takes_value(self) -> bool:
        """Whether a word has to follow."""
        return self.type != "bool"


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """All flags and environment variables of one release."""

    engine: str
    version: str
    source: str  # the package that was read, or the documentation
    basis: Literal["parser", "documented", "binary"]
    flags: tuple[Flag, ...]
    env: Mapping[str, Mapping[str, Any]]
    files: tuple[str, ...] = ()
    places: Mapping[str, int] = field(default_factory=dict)  # words beside the flags, by program
    by_name: Mapping[str, tuple[Flag, ...]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        index: dict[str, tuple[Flag, ...]] = {}
        for flag in self.flags:
            for name in flag.names:
                index[name] = (*index.get(name, ()), flag)
        object.__setattr__(self, "by_name", index)

    @property
    def title(self) -> str:
        """`vLLM 0.33.0`; of documentation alone it says so."""
        documented = " (documented only)" if self.basis == "documented" else ""
        return f"{TITLES[self.engine]} {self.version}{documented}"

    def find(self, name: str, program: str | None = None) -> Flag | None:
        """The flag typed as `name`, by the rules of the engine's parser."""
        name = self.folded(name)
        flags = self.by_name.get(name, ())
        chosen = next((f for f in flags if program in f.programs), None)
        return chosen or next((f for f in flags if not f.programs or program is None), None)

    def folded(self, name: str) -> str:
        """A name with dashes where the engine's parser reads underscores as such."""
        if self.engine not in FOLDING or not name.startswith("--"):
            return name
        head, dot, rest = name.partition(".")
        return head.replace("_", "-") + dot + rest

    def beginning_with(self, name: str, program: str | None = None) -> tuple[Flag, ...]:
        """The flags that an abbreviated long name may mean; none where the parser takes no abbreviations."""
        if self.engine not in PREFIXING or not name.startswith("--") or len(name) < 4:
            return ()
        folded = self.folded(name)
        found = {f.name: f for n, flags in self.by_name.items() if n.startswith(folded) for f in flags}
        return tuple(f for f in found.values() if not f.programs or program in f.programs)

    def check(self, name: str, program: str | None = None) -> Flag:
        """The flag of that very name.

        Raises: ConfigError with the nearest names: for emitted lines, where this would be our bug.
        """
        flag = self.find(name, program)
        if flag is None:
            raise ConfigError(f"{self.title} has no flag {name}; {nearest(name, self.by_name)}")
        return flag


@cache
def versions(engine: str) -> tuple[str, ...]:
    """The releases that an inventory is there for, oldest first."""
    found = [path.stem.partition("-")[2] for path in FOLDER.glob(f"{engine}-*.json")]
    return tuple(sorted(found, key=version_key))


def version_key(text: str) -> tuple[int, ...]:
    """A release's numbers, for sorting: `0.5.12.post1` is (0, 5, 12, 1)."""
    return tuple(int(number) for number in re.findall(r"\d+", text))


def choose(engine: str, version: str | None = None) -> Inventory:
    """The inventory of a release; of another than those there are, the newest before it, else the oldest.

    Raises: ConfigError for a version that is no number, and for an engine without inventories.
    """
    there = versions(engine)
    if not there:
        raise ConfigError(f"no flags are known of {engine!r}; {nearest(engine, ENGINES)}")
    if version is None:
        return load(engine, there[-1])
    wanted = version_key(version)
    if not wanted or not re.fullmatch(r"v?\d[\w.+-]*", version):
        raise ConfigError(f"{version!r} is no version of {engine}; there are {', '.join(there)}")
    older = [one for one in there if version_key(one) <= wanted]
    return load(engine, older[-1] if older else there[0])


@cache
def load(engine: str, version: str) -> Inventory:
    """One inventory, read once."""
    data = json.loads((FOLDER / f"{engine}-{version}.json").read_text(encoding="utf-8"))
    lists = ("aliases", "off", "choices", "known", "keys", "programs")
    flags = []
    for one in data.pop("flags"):
        facts: dict[str, Any] = {k: tuple(map(str, v)) if k in lists else v for k, v in one.items()}
        flags.append(Flag(**facts))
    data["files"] = tuple(data["files"])
    return Inventory(**data, flags=tuple(flags))


def history(engine: str, name: str) -> tuple[tuple[str, Flag], ...]:
    """The releases that know a name, oldest first, with the flag there."""
    found = []
    for version in versions(engine):
        flag = load(engine, version).find(name)
        if flag is not None:
            found.append((version, flag))
    return tuple(found)


def owners(name: str, but: Sequence[str] = ()) -> tuple[str, ...]:
    """The engines whose newest release knows a name, or takes it as the beginning of one name."""
    newest = {e: choose(e) for e in ENGINES if e not in but}
    return tuple(e for e, one in newest.items() if one.find(name) or len(one.beginning_with(name)) == 1)
