"""What the engine needs of a grammar: masks over the vocabulary. Who compiles them, from what, is outside."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]


class Matcher(Protocol):
    """Where one output stands in its grammar."""

    def mask(self) -> BoolArray:
        """[V] bool: which tokens may come next."""
        ...

    def advance(self, token_id: int) -> None:
        """Take the token that was chosen."""
        ...


class Grammars(Protocol):
    """Makes matchers from what a request's `grammar` says."""

    def check(self, schema: str) -> None:
        """Raise RequestError when `compile` would."""
        ...

    def compile(self, schema: str) -> Matcher:
        """A matcher at the start of its output."""
        ...
