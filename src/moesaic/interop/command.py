"""Shell text to launch lines of engines: which program, with which variables, flags and values.

A reader of text: nothing is run or expanded. Whether the flags exist is not known here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from moesaic.errors import ConfigError

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_REDIRECTION = re.compile(r"(?<=\s)(?:\d?>&\d|&>>?\s*\S+|\d?>>?\s*[\w./-]+)")
MODULES: Mapping[str, tuple[str, str]] = {
    "vllm.entrypoints.openai.api_server": ("vllm", "api_server"),
    "vllm.entrypoints.cli.main": ("vllm", "serve"),
    "sglang.launch_server": ("sglang", "launch_server"),
    "tensorrt_llm.commands.serve": ("trtllm", "serve"),
}
PROGRAMS: Mapping[str, tuple[str, str]] = {
    "trtllm-serve": ("trtllm", "serve"), "trtllm-bench": ("trtllm", "bench"),
    "llama-server": ("llamacpp", "server"), "llama-cli": ("llamacpp", "cli"),
    "llama-completion": ("llamacpp", "completion"),
    **{f"{name}_perf": ("nccltests", name) for name in (
        "alltoall", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "sendrecv", "gather",
        "scatter", "hypercube",
    )},
}  # fmt: skip
IMAGES: tuple[tuple[str, str, str], ...] = (
    ("vllm/vllm-openai", "vllm", "api_server"),
    ("lmsysorg/sglang", "sglang", "launch_server"),
    ("nvidia/tensorrt-llm", "trtllm", "serve"),
    ("ggml-org/llama.cpp", "llamacpp", "server"),
    ("ggerganov/llama.cpp", "llamacpp", "server"),
)
_DOCKER_BARE = frozenset({
    "-d", "-i", "-t", "-it", "-ti", "-dit", "-itd", "-P", "--rm", "--privileged", "--init", "--detach",
    "--interactive", "--tty", "--read-only", "--no-healthcheck", "--oom-kill-disable", "--publish-all",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A flag as it was typed. `word` keeps the spelling; `inline` is what followed an equals sign."""

    word: str
    inline: str | None
    after: tuple[str, ...]  # the words up to the next flag


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One launch line. `engine` is None for a program that is no engine's."""

    engine: str | None
    program: str
    env: Mapping[str, str]
    leading: tuple[str, ...]  # words before the first flag
    options: tuple[Option, ...]
    image_version: str | None = None
    words: tuple[str, ...] = ()


def read_commands(text: str) -> tuple[Command, ...]:
    """The commands of a shell text: lines joined at backslashes, comments dropped, exports carried on.

    Raises: ConfigError for quotes that do not close.
    """
    found: list[Command] = []
    exported: dict[str, str] = {}
    for words in _split(text):
        env, rest = _assignments(words)
        if rest[:1] == ["export"]:
            exported |= _assignments(rest[1:])[0]
        elif not rest:
            exported |= env
        else:
            found.append(_command(rest, {**exported, **env}))
    return tuple(found)


def _split(text: str) -> Iterator[list[str]]:
    joined = re.sub(r"\\\r?\n", " ", _without_comments(text))
    joined = re.sub(r"^\s*(?:\$|>)\s+", "", joined, flags=re.MULTILINE)
    lexer = shlex.shlex(_REDIRECTION.sub("", joined), posix=True, punctuation_chars=";&|()\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    try:
        for word in lexer:
            if set(word) <= {"\n", ";", "&", "|", "(", ")"} and word:
                if words:
                    yield words
                words = []
            elif word.strip():  # a backslash before a blank makes a word of the blank
                words.append(word)
    except ValueError as error:
        raise ConfigError(
            f"the line cannot be read as a shell would: {str(error).lower()}; close every quote"
        ) from error
    if words:
        yield words


def _without_comments(text: str) -> str:
    """The text without what follows a # that begins a word outside quotes, up to the end of its line."""
    kept: list[str] = []
    quote, is_comment, before = "", False, "\n"
    for char in text:
        if char == "\n":
            is_comment = False
        elif quote:
            quote = "" if char == quote and before != "\\" else quote
        elif not is_comment:
            is_comment = char == "#" and before in " \t\n"
            quote = char if char in "'\"" and before != "\\" else ""
        if not is_comment:
            kept.append(char)
        before = char
    return "".join(kept)


def _assignments(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    env: dict[str, str] = {}
    rest = list(words)
    while rest and (_ASSIGNMENT.match(rest[0]) or rest[0] == "env"):
        name, sign, value = rest.pop(0).partition("=")
        if sign:
            env[name] = value
    return env, rest


def _command(words: list[str], env: dict[str, str]) -> Command:
    """The engine's own words, with what starts it (python -m, docker run, mpirun) taken off."""
    for idx, word in enumerate(words):
        name = PurePosixPath(word).name
        following = words[idx + 1] if idx + 1 < len(words) else ""
        if name == "docker" and following == "run":
            image = _docker(words, idx + 2, env)
            if image is not None:
                return image
            break
        if word == "-c" and idx and PurePosixPath(words[idx - 1]).name in ("sh", "bash") and following:
            inner = read_commands(following)
            if inner:
                return replace(inner[-1], env={**env, **inner[-1].env})
        if word == "-m" and following in MODULES:
            return _build(*MODULES[following], env, words, idx + 2)
        verb = _verb(name, following)
        if verb is not None:
            return _build(*verb, env, words, idx + 2)
        if name in PROGRAMS:
            engine, program = PROGRAMS[name]
            skip = 1 + (following in ("serve", "disaggregated") and engine == "trtllm")
            if following == "disaggregated":
                program = following
            return _build(engine, program, env, words, idx + skip)
    return _build(None, PurePosixPath(words[0]).name, env, words, 1)


def _verb(name: str, following: str) -> tuple[str | None, str] | None:
    """(engine, program) of a command and its verb, where they start an engine."""
    if following == "serve" and name in ("vllm", "sglang"):
        return name, "serve" if name == "vllm" else "launch_server"
    if name == "moesaic" and following and not is_flag(following):
        return "moesaic", following
    return {("vllm", "fserver"): (None, "vllm fserver"), ("kt", "run"): ("kt", "run")}.get((name, following))


def _docker(words: list[str], start: int, env: Mapping[str, str]) -> Command | None:
    """What the image's entry point gets; variables of `-e` join those in front."""
    inner = dict(env)
    idx = start
    while idx < len(words) and words[idx].startswith("-"):
        word = words[idx]
        value = word.partition("=")[2] if word.startswith("--") else ""
        idx += 1
        if not value and word not in _DOCKER_BARE and idx < len(words):
            value = words[idx]
            idx += 1
        if word.partition("=")[0] in ("-e", "--env"):
            name, _, content = value.partition("=")
            inner[name] = content
    if idx >= len(words):
        return None
    image, _, tag = words[idx].partition(":")
    for part, engine, program in IMAGES:
        if part in image:
            rest = words[idx + 1 :]
            own = _command(rest, inner) if rest and not rest[0].startswith("-") else None
            numbers = re.match(r"v?(\d+\.\d+[\w.]*)", tag)
            found_version = numbers[1] if numbers else None
            if own is not None and own.engine == engine:
                return replace(own, image_version=found_version)
            return _build(engine, program, inner, words, idx + 1, found_version)
    return None


def _build(
    engine: str | None,
    program: str,
    env: Mapping[str, str],
    words: Sequence[str],
    start: int,
    image_version: str | None = None,
) -> Command:
    leading: list[str] = []
    options: list[Option] = []
    for word in words[start:]:
        if not is_flag(word):
            if options:
                last = options[-1]
                options[-1] = Option(word=last.word, inline=last.inline, after=(*last.after, word))
            else:
                leading.append(word)
            continue
        head, sign, inline = word.partition("=")
        options.append(Option(word=head, inline=inline if sign else None, after=()))
    return Command(
        engine=engine, program=program, env=dict(env), leading=tuple(leading), options=tuple(options),
        image_version=image_version, words=tuple(words),
    )  # fmt: skip


def is_flag(word: str) -> bool:
    """Whether a word begins a flag: a dash, and no number behind it."""
    return bool(re.match(r"--?[A-Za-z]", word))
