"""Stop strings against an oracle that looks at the text one character at a time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.text.stop import StopMatcher

LETTERS = st.text(alphabet="ab", max_size=24)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


def oracle(text: str, stops: list[str], *, is_included: bool) -> tuple[str, bool]:
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end if is_included else end - max(map(len, found))], True
    return text, False


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    return [*pieces, text[at:]]


@given(text=LETTERS, stops=STOPS, sizes=st.lists(st.integers(0, 4), max_size=12), is_included=st.booleans())
@settings(max_examples=500)
def test_any_cut_gives_what_the_oracle_gives(
    text: str, stops: list[str], sizes: list[int], is_included: bool
) -> None:
    matcher = StopMatcher(stops, is_included=is_included)
    shown = "".join(matcher.feed(piece) for piece in cut(text, sizes))
    expected, is_stopped = oracle(text, stops, is_included=is_included)
    assert matcher.is_stopped == is_stopped
    assert shown + matcher.finish() == expected
    assert matcher.feed("more") == ("" if is_stopped else "more")


@given(text=LETTERS, stops=STOPS)
@settings(max_examples=200)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for i, char in enumerate(text):
        shown += matcher.feed(char)
        if matcher.is_stopped:
            return
        ends = [text[start : i + 1] for start in range(i + 2)]
        held = next(end for end in ends if any(stop.startswith(end) for stop in stops))
        assert shown + held == text[: i + 1]


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["Hel", "lo ST", "OP now"], ["STOP"], "Hello "),
        (["a<", "/s", "> b"], ["</s>", "</t>"], "a"),
        (["line\n", "\nnext"], ["\n\n"], "line"),
        (["xabcd"], ["bc", "abcd"], "xa"),
        (["x\U0001f600", "y"], ["\U0001f600y"], "x"),
    ],
)
def test_examples(pieces: list[str], stops: list[str], expected: str) -> None:
    matcher = StopMatcher(stops)
    assert "".join(map(matcher.feed, pieces)) == expected
    assert matcher.is_stopped


def test_without_stop_strings_text_passes_unchanged() -> None:
    matcher = StopMatcher([])
    assert matcher.feed("anything") == "anything"
    assert matcher.finish() == ""
    assert not matcher.is_stopped
