"""Stop strings over streamed text. Knows no tokens: however the text is cut, the answer is the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    """One prefix of the stop strings."""

    depth: int  # its length: so much text is held back here
    next: dict[str, _Node] = field(default_factory=dict)
    fail: _Node | None = None  # the longest proper suffix of this prefix that is a prefix too
    num_matched: int = 0  # length of the longest stop string that ends here


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces, and holds back what may become one.

    The string that ends first wins; of those that end together, the longest. The text before it is what
    `feed` and `finish` gave, joined; with `is_included` the stop string itself follows. One step per
    character, whatever the number of strings (Aho and Corasick, 1975).
    """

    def __init__(self, stops: Sequence[str], *, is_included: bool = False) -> None:
        self._root = _build([stop for stop in stops if stop])
        self._node = self._root
        self._held = ""
        self._is_included = is_included
        self.is_stopped = False

    def feed(self, text: str) -> str:
        """The text that is safe to show now. After a stop string nothing is."""
        if self.is_stopped:
            return ""
        if not self._root.next:
            return text
        text = self._held + text
        node = self._node
        for i in range(len(self._held), len(text)):
            node = _step(self._root, node, text[i])
            if node.num_matched:
                self.is_stopped, self._held = True, ""
                return text[: i + 1 if self._is_included else i + 1 - node.num_matched]
        self._node = node
        num_shown = len(text) - node.depth
        self._held = text[num_shown:]
        return text[:num_shown]

    def finish(self) -> str:
        """The text held back, when no more will come."""
        held, self._held, self._node = self._held, "", self._root
        return held


def _step(root: _Node, node: _Node, char: str) -> _Node:
    while char not in node.next:
        if node.fail is None:
            return root
        node = node.fail
    return node.next[char]


def _build(stops: Sequence[str]) -> _Node:
    root = _Node(0)
    for stop in stops:
        node = root
        for char in stop:
            node = node.next.setdefault(char, _Node(node.depth + 1))
        node.num_matched = node.depth
    queue = deque([root])
    while queue:
        node = queue.popleft()
        for char, child in node.next.items():
            child.fail = root if node.fail is None else _step(root, node.fail, char)
            child.num_matched = child.num_matched or child.fail.num_matched
            queue.append(child)
    return root
