"""The blocks of one cache group: free, held, or kept for reuse under a key. Every verb is O(1).

free  --take-->  held  --drop-->  free            (no key)
                 held  --drop-->  idle            (published: content stays findable)
idle  --hold-->  held
idle  --take-->  held                             (least recently dropped first; its key is forgotten)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from moesaic.sched.key import KvKey


class BlockPool:
    """Reference counts and the prefix cache over `num_blocks` equal blocks.

    Owns:    a block from `take` or `hold` must be dropped exactly once per call.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low ids first
        self._refs = [0] * num_blocks
        self._key_of: list[KvKey | None] = [None] * num_blocks
        self._block_of: dict[KvKey, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently dropped first
        self.changes: list[tuple[KvKey, bool]] | None = (
            None  # (key, is findable now), once someone collects them
        )

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give: free ones, and idle ones at the price of their content."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        """Blocks with at least one holder."""
        return self.num_blocks - self.num_available

    @property
    def num_idle(self) -> int:
        """Blocks kept only for reuse."""
        return len(self._idle)

    def refs(self, block_id: int) -> int:
        """Holders of a block."""
        return self._refs[block_id]

    def find(self, key: KvKey) -> int | None:
        """The block whose content has this key."""
        return self._block_of.get(key)

    def take(self) -> int:
        """A block for new content, held once."""
        assert self._free or self._idle, "take from an exhausted pool: the caller counts num_available first"
        if self._free:
            block_id = self._free.pop()
        else:
            block_id, _ = self._idle.popitem(last=False)
            self.forget(block_id)
        self._refs[block_id] = 1
        return block_id

    def hold(self, block_id: int) -> None:
        """One more holder for a findable block."""
        if self._refs[block_id] == 0:
            del self._idle[block_id]
        self._refs[block_id] += 1

    def drop(self, block_id: int) -> None:
        """One holder fewer; the last one leaves the block idle if its content is findable, free otherwise."""
        assert self._refs[block_id] > 0, f"block {block_id} dropped more often than held"
        self._refs[block_id] -= 1
        if self._refs[block_id] == 0:
            if self._key_of[block_id] is None:
                self._free.append(block_id)
            else:
                self._idle[block_id] = None

    def publish(self, block_id: int, key: KvKey) -> None:
        """Make a held, fully computed block findable; the first block with a key keeps it."""
        if self._key_of[block_id] is None and key not in self._block_of:
            self._key_of[block_id] = key
            self._block_of[key] = block_id
            if self.changes is not None:
                self.changes.append((key, True))

    def forget(self, block_id: int) -> None:
        """Make a block's content unfindable; its holders keep it."""
        key = self._key_of[block_id]
        if key is not None:
            del self._block_of[key]
            self._key_of[block_id] = None
            if self.changes is not None:
                self.changes.append((key, False))

    def check(self, holders: Mapping[int, int]) -> None:
        """Verify the pool against the true number of holders per block; for tests, O(num_blocks)."""
        free, idle = set(self._free), set(self._idle)
        held = {block_id for block_id, refs in enumerate(self._refs) if refs > 0}
        assert len(free) == len(self._free), "a block is on the free list twice"
        assert len(free | idle | held) == self.num_blocks, "a block is lost"
        assert len(free) + len(idle) + len(held) == self.num_blocks, "a block is in two places"
        assert {b: self._refs[b] for b in held} == dict(holders), "reference counts differ from the holders"
        keyed = {key: block_id for block_id, key in enumerate(self._key_of) if key is not None}
        assert keyed == self._block_of, "keys and blocks disagree"
        assert all(self._key_of[b] is None for b in free), "a free block is findable"
        assert all(self._key_of[b] is not None for b in idle), "an idle block cannot be found"
