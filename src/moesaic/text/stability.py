"""Prompts whose beginning changes from request to request, so that a prefix cache finds less than it could.

Compares the prompts of one file with each other: where two part for a timestamp, an id, a counter, tools in
another order or blanks, and would have gone on alike. Knows nothing of files or of engines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from moesaic.errors import ConfigError
from moesaic.sched.key import KvKey, extend_keys

BLOCK = 16  # tokens, or characters where there is no tokenizer, that a prefix cache keeps together
MIN_LOST = 2 * BLOCK  # characters in common behind a change: fewer are chance
NEIGHBOURS = 32  # earlier prompts that each is compared with
ERROR_SHARE = 0.1  # guess: a prompt that loses more is worth stopping a release for

Kind = Literal["timestamp", "date", "time", "uuid", "id", "epoch", "counter", "tool order", "whitespace"]
_MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_VOLATILE = re.compile(
    r"(?P<timestamp>\d{4}-\d{2}-\d{2}[T ]\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)"
    r"|(?P<date>\d{4}-\d{2}-\d{2}|\d{1,2}/\d{1,2}/\d{2,4}"
    rf"|{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?,? \d{{4}}|\d{{1,2}} {_MONTH} \d{{4}})"
    r"|(?P<time>\b\d{1,2}:\d{2}(?::\d{2})?\b)"
    r"|(?P<uuid>\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b)"
    r"|(?P<id>\b(?=[0-9a-f]*\d)[0-9a-f]{12,}\b|\b(?=\w*\d)(?=\w*[A-Za-z])\w{16,}\b"
    r"|\b(?:req|run|call|session|trace|user|conv|chatcmpl|msg)[-_](?=\w*\d)\w{4,}\b)"
    r"|(?P<epoch>\b1\d{9}(?:\d{3})?\b)"
    r"|(?P<counter>\b\d+\b)"
)
_BLANKS = re.compile(r"\s+")
ADVICE: Mapping[str, str] = {
    "tool order": "send tools in one order, as sorted by name",
    "whitespace": "build the text the same way every time: no trailing blanks, one kind of line end",
}
MOVE = "move it to the end of the prompt, or into the last message"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One request: sections in the order in which a model reads them, and what is last asked."""

    sections: tuple[tuple[str, str], ...]  # (path in the request, text)
    tools: tuple[str, ...] = ()
    last: int = -1  # the section that is expected to differ; -1: none

    @property
    def text(self) -> str:
        """All sections, one after the other."""
        return "".join(text for _, text in self.sections)

    def section_at(self, position: int) -> int:
        """The section that a character is in."""
        end = 0
        for idx, (_, text) in enumerate(self.sections):
            end += len(text)
            if position < end:
                return idx
        return len(self.sections) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Unstable:
    """One place at which prompts part although they would go on alike.

    Units:  position counts characters of the prompt as this module writes it out.
    """

    kind: Kind
    path: str
    position: int
    num_prompts: int  # that part here
    before: str  # what stands there in an earlier prompt, and in the first that differs
    after: str
    lost_share: float  # of a prompt that would have been found in the cache, mean
    suggestion: str

    @property
    def severity(self) -> Literal["error", "warning"]:
        """How much it costs."""
        return "error" if self.lost_share >= ERROR_SHARE else "warning"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stability:
    """Of a file of prompts: what is unstable, and the share of all prompts that a prefix cache would hold."""

    num_prompts: int
    unit: Literal["tokens", "characters"]
    hit_rate: float
    hit_rate_after: float  # with every unstable span moved to the end
    findings: tuple[Unstable, ...]


def read_prompt(data: Any, where: str) -> Prompt:
    """A prompt from a request body, a list of messages, or a text.

    Raises: ConfigError for anything else; `where` names it.
    """
    if isinstance(data, Mapping) and isinstance(data.get("body"), Mapping):
        data = data["body"]
    if isinstance(data, str):
        return Prompt(sections=(("prompt", data),))
    messages = data.get("messages") if isinstance(data, Mapping) else data
    if isinstance(data, Mapping) and messages is None:
        for name in ("prompt", "text", "input"):
            if isinstance(data.get(name), str):
                return Prompt(sections=((name, data[name]),))
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
        raise ConfigError(
            f'{where}: neither a text nor a request; a line is {{"prompt": ...}}, {{"messages": [...]}} or a '
            "JSON string"
        )
    tools = data.get("tools") if isinstance(data, Mapping) else None
    written = tuple(json.dumps(tool) for tool in tools) if isinstance(tools, list) else ()
    sections = [("tools", "\n".join(written) + "\n")] if written else []
    for idx, message in enumerate(messages):
        content = message.get("content")
        text = content if isinstance(content, str) else json.dumps(content)
        sections.append((f"messages[{idx}].content", f"{message.get('role', '')}: {text}\n"))
    return Prompt(
        sections=tuple(sections), tools=written, last=len(sections) - 1 if len(messages) > 1 else -1
    )


def measure(prompts: Sequence[Prompt], encode: Callable[[str], Sequence[int]] | None = None) -> Stability:
    """What is unstable in prompts of one application, in the order in which they were sent.

    `encode` is a tokenizer; without one the cache is measured in characters.

    Raises: ConfigError for fewer than two prompts: there is nothing to compare.
    """
    if len(prompts) < 2:
        raise ConfigError(f"{len(prompts)} prompt is nothing to compare: give a file of several requests")
    to_ids = encode if encode is not None else _characters
    found = list(_partings(prompts))
    moved = [_moved(prompt, found) for prompt in prompts]
    return Stability(
        num_prompts=len(prompts), unit="characters" if encode is None else "tokens",
        hit_rate=hit_rate([to_ids(prompt.text) for prompt in prompts]),
        hit_rate_after=hit_rate([to_ids(text) for text in moved]),
        findings=tuple(_summary(found)),
    )  # fmt: skip


def hit_rate(prompts: Sequence[Sequence[int]]) -> float:
    """The share of all ids that an unbounded prefix cache has when they come in this order."""
    seen: set[KvKey] = set()
    hits = total = 0
    for ids in prompts:
        keys: list[KvKey] = []
        extend_keys(keys, b"", ids, BLOCK)
        known = next((idx for idx, key in enumerate(keys) if key not in seen), len(keys))
        seen.update(keys)
        hits, total = hits + known * BLOCK, total + len(ids)
    return hits / total if total else 0.0


def _characters(text: str) -> list[int]:
    return [ord(char) for char in text]


# --- where prompts part


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parting:
    kind: Kind
    prompt: int
    path: str
    position: int
    place: int  # the same for every prompt that parts here
    before: str
    after: str
    lost_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Masked:
    """A text with its volatile spans cut down to one mark each, and where each character came from."""

    text: str
    origin: tuple[int, ...]  # of each character of `text`, and of its end
    spans: tuple[tuple[int, int, str], ...]  # in the raw text, with the kind


def _masked(text: str) -> _Masked:
    pieces: list[str] = []
    origin: list[int] = []
    spans: list[tuple[int, int, str]] = []
    end = 0
    for match in _VOLATILE.finditer(text):
        pieces.append(text[end : match.start()])
        origin += range(end, match.start())
        pieces.append("\x00")
        origin.append(match.start())
        spans.append((match.start(), match.end(), str(match.lastgroup)))
        end = match.end()
    pieces.append(text[end:])
    origin += range(end, len(text) + 1)
    return _Masked(text="".join(pieces), origin=tuple(origin), spans=tuple(spans))


def _partings(prompts: Sequence[Prompt]) -> Iterator[_Parting]:
    earlier: list[tuple[Prompt, _Masked]] = []
    for idx, prompt in enumerate(prompts):
        masked = _masked(prompt.text)
        if earlier:
            near, other = max(earlier, key=lambda pair: _common(pair[1].text, masked.text))
            yield from _tool_order(idx, prompt, earlier)
            yield from _spans(idx, prompt, masked, near, other)
            yield from _whitespace(idx, prompt, near)
        earlier = [*earlier[-NEIGHBOURS + 1 :], (prompt, masked)]


def _spans(idx: int, prompt: Prompt, masked: _Masked, near: Prompt, other: _Masked) -> Iterator[_Parting]:
    """Volatile spans that differ while the text around them does not."""
    shared = _common(masked.text, other.text)
    if shared <= MIN_LOST:
        return
    for place, (mine, theirs) in enumerate(zip(masked.spans, other.spans, strict=False)):
        position = mine[0]
        if position >= masked.origin[min(shared, len(masked.origin) - 1)]:
            return
        one, two = near.text[theirs[0] : theirs[1]], prompt.text[mine[0] : mine[1]]
        rest = masked.origin[min(shared, len(masked.origin) - 1)] - mine[1]
        if one == two or rest < MIN_LOST or prompt.section_at(position) == prompt.last:
            continue
        yield _Parting(
            kind=mine[2],  # type: ignore[arg-type]
            prompt=idx, path=prompt.sections[prompt.section_at(position)][0], position=position, place=place,
            before=one, after=two, lost_share=rest / len(prompt.text),
        )  # fmt: skip


def _tool_order(idx: int, prompt: Prompt, earlier: Sequence[tuple[Prompt, _Masked]]) -> Iterator[_Parting]:
    same = [other for other, _ in earlier if sorted(other.tools) == sorted(prompt.tools)]
    if not prompt.tools or not same or any(other.tools == prompt.tools for other in same):
        return
    other = max(same, key=lambda one: _common(one.text, prompt.text))
    position = _common(other.text, prompt.text)
    lost = len(prompt.text) - len(prompt.sections[prompt.last][1]) - position
    yield _Parting(
        kind="tool order", prompt=idx, path="tools", position=position, place=-1,
        before=_names(other.tools), after=_names(prompt.tools), lost_share=max(lost, 0) / len(prompt.text),
    )  # fmt: skip


def _names(tools: Sequence[str]) -> str:
    names = re.findall(r'"name": "([^"]+)"', "\n".join(tools))
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _whitespace(idx: int, prompt: Prompt, near: Prompt) -> Iterator[_Parting]:
    """Texts that part at a blank and are the same without."""
    one, two = near.text, prompt.text
    position = _common(one, two)
    if not (one[position : position + 1].isspace() or two[position : position + 1].isspace()):
        return
    section = prompt.section_at(position)
    rest = _common(_BLANKS.sub("", one[position:]), _BLANKS.sub("", two[position:]))
    if rest < MIN_LOST or section == prompt.last:
        return
    yield _Parting(
        kind="whitespace", prompt=idx, path=prompt.sections[section][0], position=position, place=-2,
        before=repr(one[position : position + 8]), after=repr(two[position : position + 8]),
        lost_share=rest / len(two),
    )  # fmt: skip


def _common(one: str, two: str) -> int:
    """Length of the common beginning."""
    low, high = 0, min(len(one), len(two))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == two[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _summary(found: Sequence[_Parting]) -> Iterator[Unstable]:
    places: dict[tuple[str, str, int], list[_Parting]] = {}
    for one in found:
        places.setdefault((one.kind, one.path, one.place), []).append(one)
    for same in sorted(places.values(), key=lambda group: -len(group) * fmean(p.lost_share for p in group)):
        first = same[0]
        yield Unstable(
            kind=first.kind, path=first.path, position=first.position, num_prompts=len(same),
            before=first.before, after=first.after, lost_share=fmean(one.lost_share for one in same),
            suggestion=ADVICE.get(first.kind, MOVE),
        )  # fmt: skip


def _moved(prompt: Prompt, found: Sequence[_Parting]) -> str:
    """The prompt with what is unstable at its end, tools sorted, and blanks as one."""
    places = {(one.path, one.place) for one in found}
    kinds = {one.kind for one in found}
    sections = list(prompt.sections)
    if "tool order" in kinds and prompt.tools:
        sections[0] = ("tools", "\n".join(sorted(prompt.tools)) + "\n")
    text = "".join(part for _, part in sections)
    masked = _masked(text)
    kept, tail, end = [], [], 0
    for place, (start, stop, _) in enumerate(masked.spans):
        if (prompt.sections[prompt.section_at(start)][0], place) in places:
            kept.append(text[end:start])
            tail.append(text[start:stop])
            end = stop
    moved = "".join([*kept, text[end:], *tail])
    return _BLANKS.sub(" ", moved) if "whitespace" in kinds else moved
