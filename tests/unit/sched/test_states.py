"""The life of a request's two state slots, as its plans name them."""

from __future__ import annotations

from collections import Counter

from hash_model import HashModel, Owner, make_request, make_scheduler, run_alone, state_group, tokens_group


def test_state_slots_take_turns_and_are_free_at_every_kind_of_end() -> None:
    groups = [tokens_group(), state_group()]
    scheduler, model, owner = make_scheduler(groups, [9, 6], max_num_seqs=3), HashModel(groups, 4), Owner()
    for i, name in enumerate(("kept", "cancelled", "failed")):
        scheduler.add(make_request(name, range(i, 6 + i), max_tokens=12, ignore_eos=True), 0.0)
    written: dict[str, int | None] = {}
    num_steps = 0
    while (plan := scheduler.schedule(0.0)) is not None:
        rows = plan.batches[0].rows
        slots = [slot for row in rows for slot in {row.state_from, row.state_to} - {None}]
        assert len(slots) == len(set(slots)), "two requests share a slot"
        for row in rows:
            assert row.state_from == (written[row.request_id] if row.start_idx else None)
            assert row.state_to not in (row.state_from, None)
            written[row.request_id] = row.state_to
        num_steps += 1
        if num_steps == 3:
            owner.take(scheduler.cancel("cancelled"))  # in flight: freed when the step is committed
        failing = {"failed"} if num_steps == 4 else set()
        owner.take(scheduler.commit(model.run(plan, failing=failing), 0.0))
        scheduler.replicas[0].ledger.check()
    assert scheduler.stats().kv_blocks_used == 0
    assert len(owner.tokens["kept"]) == 12


def test_a_preempted_request_gives_its_slots_back_and_begins_anew() -> None:
    groups = [tokens_group(), state_group()]
    scheduler, model, owner = make_scheduler(groups, [5, 4], max_num_seqs=2), HashModel(groups, 4), Owner()
    requests = [make_request(name, range(6), max_tokens=10, ignore_eos=True) for name in ("first", "second")]
    for request in requests:
        scheduler.add(request, 0.0)
    begun: Counter[str] = Counter()
    while (plan := scheduler.schedule(0.0)) is not None:
        for row in plan.batches[0].rows:
            assert (row.state_from is None) == (row.start_idx == 0)
            begun[row.request_id] += row.start_idx == 0
        owner.take(scheduler.commit(model.run(plan), 0.0))
        scheduler.replicas[0].ledger.check()
    assert scheduler.stats().preemptions_total > 0
    assert begun["second"] == 1 + scheduler.stats().preemptions_total
    assert scheduler.stats().kv_blocks_used == 0
    for request in requests:
        assert tuple(owner.tokens[request.request_id]) == run_alone(groups, request, 16)[0]
