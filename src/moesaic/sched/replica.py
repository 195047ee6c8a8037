"""The rows of one attention replica's next step: who runs, who is admitted, who gives way."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from moesaic.sched.key import extend_keys
from moesaic.sched.ledger import KvLedger
from moesaic.sched.sequence import SequenceState
from moesaic.sched.step import RowPlan

_order = attrgetter("order")

Placed = tuple[SequenceState, RowPlan]


class Replica:
    """Queue, running set and ledger of one replica.

    One pass in order (class, then arrival) over running and waiting requests together. A request that lacks
    blocks or a place takes them from the last in that order, which has no row yet. So the first in order
    always advances, nobody waits for a later one, and no two requests take from each other.
    """

    def __init__(self, ledger: KvLedger, *, max_num_seqs: int, max_tokens_per_step: int) -> None:
        self.ledger = ledger
        self.running: list[SequenceState] = []  # sorted by order
        self.num_preemptions = 0
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_tokens_per_step
        self._waiting: list[SequenceState] = []  # sorted by order

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def num_sequences(self) -> int:
        """Requests pinned here."""
        return len(self.running) + self.num_waiting

    def enqueue(self, sequence: SequenceState) -> None:
        """Let a request wait at its place in the order."""
        insort(self._waiting, sequence, key=_order)

    def withdraw(self, sequence: SequenceState) -> None:
        """Take a waiting request out of the queue."""
        self._waiting.remove(sequence)

    def end(self, sequence: SequenceState, *, is_suspect: bool = False) -> None:
        """Take a running request out and free what it holds."""
        self.running.remove(sequence)
        assert sequence.grant is not None, f"{sequence.request.request_id} runs without a grant"
        self.ledger.release(sequence.grant, is_suspect=is_suspect)
        sequence.grant = None

    def store(self, sequence: SequenceState) -> None:
        """Note in the ledger what a committed step computed for a running request."""
        grant, ledger = sequence.grant, self.ledger
        assert grant is not None, f"{sequence.request.request_id} runs without a grant"
        num_computed = sequence.num_computed
        if ledger.has_prefix_cache and num_computed // ledger.kv_block > len(sequence.keys):
            extend_keys(sequence.keys, sequence.root, sequence.token_ids, ledger.kv_block)
        ledger.commit(grant, num_computed, sequence.keys)

    def fill(self) -> list[Placed]:
        """The rows of the next step, decode first. Sequences in flight are left alone."""
        decode: list[Placed] = []
        prefill: list[Placed] = []
        # Every decode row has a token of the step set aside; prefill chunks share the rest.
        budget = self._max_tokens - sum(1 for s in self.running if s.num_left == 1 and not s.is_in_flight)
        may_admit = True
        idx = 0
        while True:
            head = self._waiting[0] if self._waiting and may_admit and budget > 0 else None
            if head is not None and (idx == len(self.running) or head.order < self.running[idx].order):
                may_admit = self._admit(head, idx)
                if not may_admit:
                    continue
                is_decode = False
            elif idx == len(self.running):
                return decode + prefill
            else:
                is_decode = self.running[idx].num_left == 1
            sequence = self.running[idx]
            idx += 1
            if sequence.is_in_flight:
                continue
            num_tokens = self._make_room(sequence, 1 if is_decode else min(sequence.num_left, budget), idx)
            if num_tokens == 0:
                continue
            row = sequence.row(num_tokens, self.ledger.kv_block)
            if is_decode:
                decode.append((sequence, row))
            else:
                prefill.append((sequence, row))
                budget -= num_tokens

    def _admit(self, head: SequenceState, idx: int) -> bool:
        """Move the head of the queue to place `idx` of the running; those that come later give way.

        Each running request before it may need one more block at any step and would take it from the
        newcomer, so as many are left free.
        """
        ledger = self.ledger
        while len(self.running) >= self._max_num_seqs:
            if not self._preempt_last(idx):
                return False
        match = None
        while True:
            if ledger.has_prefix_cache and head.prompt_logprobs is None:
                extend_keys(head.keys, head.root, head.token_ids, ledger.kv_block)
                match = ledger.match(head.keys, len(head.token_ids))
            grant = ledger.reserve(head.request.request_id, len(head.token_ids), match, num_spare=idx)
            if grant is not None:
                break
            if not self._preempt_last(idx):
                return False
        del self._waiting[0]
        head.grant = grant
        head.num_computed = grant.num_cached
        if head.num_cached is None:
            head.num_cached = grant.num_cached
        self.running.insert(idx, head)
        return True

    def _make_room(self, sequence: SequenceState, num_wanted: int, next_idx: int) -> int:
        """Give places to up to `num_wanted` more tokens; requests at `next_idx` or later give way.

        Returns how many got one.
        """
        grant = sequence.grant
        assert grant is not None, f"{sequence.request.request_id} runs without a grant"
        if num_wanted <= 0 or sequence.num_computed + num_wanted <= grant.num_places:
            return num_wanted
        while True:
            num_tokens = min(num_wanted, self.ledger.reach(grant) - sequence.num_computed)
            if num_tokens > 0:
                self.ledger.extend(grant, sequence.num_computed + num_tokens)
                return num_tokens
            if not self._preempt_last(next_idx):
                return 0

    def _preempt_last(self, first_idx: int) -> bool:
        """Send the last running request at `first_idx` or later back to the queue, if there is one."""
        for idx in range(len(self.running) - 1, first_idx - 1, -1):
            victim = self.running[idx]
            if not victim.is_in_flight:
                self.end(victim)
                victim.rewind()
                self.enqueue(victim)
                self.num_preemptions += 1
                return True
        return False
