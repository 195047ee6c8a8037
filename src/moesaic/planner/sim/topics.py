"""Made-up router inputs whose tokens cluster by topic. Knows no gate and no expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from moesaic.spec.experts import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Topics:
    """Centres of topics in the model's width. A token is unit noise plus `strength` times its topic's centre.

    Shapes:  centres_ZD [topics, D] float64.
    """

    centres_ZD: FloatArray
    strength: float

    @classmethod
    def make(cls, rng: np.random.Generator, *, num_topics: int, width: int, strength: float) -> Self:
        """Centres of independent standard normals."""
        return cls(centres_ZD=rng.standard_normal((num_topics, width)), strength=strength)

    def draw(
        self, rng: np.random.Generator, num_tokens: int, *, share: float, hot_topic: int = 0
    ) -> FloatArray:
        """Tokens of which about `share` belong to `hot_topic`, the rest evenly to the others.

        A share of one over the number of topics is the even mix.

        Shapes:  returns x_TD [num_tokens, D] float64.
        """
        num_topics = len(self.centres_ZD)
        is_hot = rng.random(num_tokens) < share
        other = rng.integers(0, num_topics - 1, num_tokens)
        topic = np.where(is_hot, hot_topic, other + (other >= hot_topic))
        noise_TD = rng.standard_normal((num_tokens, self.centres_ZD.shape[1]))
        return noise_TD + self.strength * self.centres_ZD[topic]
