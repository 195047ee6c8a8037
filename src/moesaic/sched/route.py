"""Which of several engines a request goes to: functions of what a router knows. No socket, no clock.

The router in front of a fleet and the simulator call the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moesaic.errors import ConfigError
from moesaic.hashing import rendezvous
from moesaic.sched.key import KvKey
from moesaic.spec.deployment import KvAffinity, LoadAffinity, PrefixAffinity, RoundRobin, RoutePolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineView:
    """What a router knows of one engine when a request arrives.

    Units:  tokens; hit_tokens are leading ones of this prompt that the directory says are cached there.
    """

    pending_tokens: int = 0  # of prompts that wait there, the one that is computed too
    num_running: int = 0
    hit_tokens: int = 0


class KvDirectory:
    """Which engines hold which blocks, as far as their reports have arrived. May be behind, never blocks."""

    def __init__(self, num_engines: int) -> None:
        self.num_engines = num_engines
        self._holders: dict[KvKey, int] = {}  # one bit per engine

    def report(self, engine_idx: int, changes: Iterable[tuple[KvKey, bool]]) -> None:
        """Take in what became findable at an engine and what stopped being so, in order."""
        bit = 1 << engine_idx
        for key, is_held in changes:
            holders = self._holders.get(key, 0)
            holders = holders | bit if is_held else holders & ~bit
            if holders:
                self._holders[key] = holders
            else:
                self._holders.pop(key, None)

    def forget(self, engine_idx: int) -> None:
        """Drop all that an engine held: it left, or it began anew."""
        keys = [key for key, holders in self._holders.items() if holders >> engine_idx & 1]
        self.report(engine_idx, ((key, False) for key in keys))

    def hits(self, keys: Sequence[KvKey]) -> list[int]:
        """Leading blocks that each engine holds."""
        found = [0] * self.num_engines
        left = (1 << self.num_engines) - 1
        for count, key in enumerate(keys, 1):
            left &= self._holders.get(key, 0)
            if not left:
                break
            for idx in range(self.num_engines):
                if left >> idx & 1:
                    found[idx] = count
        return found


def choose(
    policy: RoutePolicy, views: Sequence[EngineView], *, turn: int, keys: Sequence[KvKey], prompt_tokens: int
) -> int:
    """The engine for a request; `turn` counts requests, `keys` are those of the prompt's full blocks.

    Raises: ConfigError without an engine.
    """
    if not views:
        raise ConfigError("a request needs at least one engine to go to, and the fleet has none")
    if isinstance(policy, RoundRobin):
        return turn % len(views)
    if isinstance(policy, PrefixAffinity):
        # A prompt without a full block has no prefix to share.
        names = [idx.to_bytes(4, "little") for idx in range(len(views))]
        return rendezvous(keys[: policy.num_blocks][-1], names) if keys else turn % len(views)
    if isinstance(policy, KvAffinity):
        return kv_affinity(views, turn, prompt_tokens, policy)
    return load_affinity(views, turn, prompt_tokens, policy)


def kv_affinity(views: Sequence[EngineView], turn: int, prompt_tokens: int, policy: KvAffinity) -> int:
    """The most hits; where they are few, or alike, the engine with the least to do, then in turn."""
    least = policy.least_hit * prompt_tokens

    def rank(idx: int) -> tuple[int, int, int, int]:
        view = views[idx]
        hit = view.hit_tokens if view.hit_tokens >= least else 0
        return -hit, view.pending_tokens, view.num_running, (idx - turn) % len(views)

    return min(range(len(views)), key=rank)


def load_affinity(views: Sequence[EngineView], turn: int, prompt_tokens: int, policy: LoadAffinity) -> int:
    """The best score of `LoadAffinity`; ties to the fewest running requests, then in turn.

    At equal weights that is the engine with the fewest tokens to compute before the answer begins.
    """

    def rank(idx: int) -> tuple[float, int, int]:
        view = views[idx]
        score = policy.hit_weight * view.hit_tokens - policy.load_weight * view.pending_tokens
        return -score / max(prompt_tokens, 1), view.num_running, (idx - turn) % len(views)

    return min(range(len(views)), key=rank)
