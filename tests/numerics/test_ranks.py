"""A model over several processes: the answers of one, every rank's part known, and an end without remains."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from marks import needs_native
from ranks import segments_left

from moesaic.engine.client import EngineSnapshot
from moesaic.engine.layout import data_parallel
from moesaic.engine.llm import LLM
from moesaic.engine.loop import Engine
from moesaic.engine.ranks import Ranks
from moesaic.errors import CapacityError, ConfigError
from moesaic.hashing import digest
from moesaic.kernels import native
from moesaic.models.build import read_spec
from moesaic.sched.request import RequestEvent, SamplingParams
from moesaic.spec.codec import to_plain
from moesaic.spec.deployment import Deployment, single_process
from moesaic.spec.experts import ExpertPlan, contiguous_plan
from moesaic.spec.numerics import preset

NUM_LAYERS = 5  # with experts, 16 each: of `demo`
PROMPTS = ("Once upon a time", "The dog", "In the morning they all went to the sea, and", "a", "Tom said")
OPTIONS: dict[str, Any] = {"num_threads": 1, "max_model_len": 256, "kv_bytes": 8_000_000}
SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=3),
    SamplingParams(temperature=0.8, top_p=0.9, max_tokens=12, seed=5, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=7),
    SamplingParams(temperature=1.0, max_tokens=9, seed=1),
    SamplingParams(temperature=0.0, max_tokens=12, min_tokens=12),
]


def answers(llm: LLM) -> list[tuple[Any, ...]]:
    return [
        (one.token_ids, one.finish_reason, one.logprobs, one.prompt_logprobs)
        for one in llm.generate(PROMPTS, SAMPLINGS)
    ]


class Alone(NamedTuple):
    """What one process says."""

    answers: list[tuple[Any, ...]]
    snapshot: EngineSnapshot
    choices: dict[str, int]


def choices_of(llm: LLM) -> dict[str, int]:
    return {load.phase: int(np.stack(load.counts).sum()) for load in llm.engine.expert_load(None)}


@pytest.fixture(scope="module")
def alone() -> Alone:
    with LLM("demo", **OPTIONS) as llm:
        return Alone(answers(llm), llm.engine.snapshot(), choices_of(llm))


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_ranks_answer_as_one_process_does_and_end_with_their_controller(
    alone: Alone, tmp_path: Path, num_ranks: int
) -> None:
    """Two with copies, unequal parts and shared weights, as a placement says; three as a deployment says."""
    path = tmp_path / "file.json"
    if num_ranks == 2:
        path.write_text(json.dumps(to_plain(uneven_plan())))
        options = OPTIONS | {"num_ranks": 2, "placement": str(path), "share_weights": True}
    else:
        path.write_text(deployment_of(alone, num_ranks).to_json())
        options = OPTIONS | {"deployment": str(path)}
    with LLM("demo", **options) as llm:
        processes = processes_of(llm.engine)
        assert answers(llm) == alone.answers
        found = llm.engine.snapshot()
        for name in ("model_digest", "numerics_digest", "backend"):
            assert found.active[name] == alone.snapshot.active[name]
        assert found.active["layout"]["num_ranks"] == num_ranks
        assert found.active["layout"]["experts"]["ep"] == num_ranks
        fastest = ("shared_memory", True) if native.levels() else ("exchange", False)
        if num_ranks == 2:  # nothing was said
            assert (found.active["layout"]["dispatcher"], found.active["layout"]["is_fused"]) == fastest
        for spent in (found.ranks.compute_s, found.ranks.transfer_s, found.ranks.wait_s):
            assert len(spent) == num_ranks
            assert min(spent.values()) > 0.0
        # Every rank has the dense weights, and its own experts alone.
        assert alone.snapshot.weight_bytes < found.weight_bytes < num_ranks * alone.snapshot.weight_bytes
        assert choices_of(llm) == alone.choices
        mapped = [mapped_weights(process.pid) for process in processes]
        if num_ranks == 2:  # what is no expert is the same file
            assert len(mapped[0] & mapped[1]) == 1
            assert len(mapped[0] | mapped[1]) == 3
            shared = [note for note in found.active["notes"] if "shared weights: " in note]
            assert len(shared) == 2, "each rank found and put something else"
            assert not any("shared weights: " in note for note in found.active["not_active"])
        pools = [rank["kv_bytes"] for rank in found.active["ranks"]]
        assert sum(pools) == found.active["kv"]["bytes"] == found.kv_bytes
        assert pools == [alone.snapshot.kv_bytes] * num_ranks
        assert found.kv_blocks_total == num_ranks * alone.snapshot.kv_blocks_total
    assert not any(Path(name).exists() for files in mapped for name in files), (
        "the last to leave removes them"
    )
    assert all(process.poll() is not None for process in processes)


def mapped_weights(process_id: int) -> set[str]:
    """Files of weights that a process maps."""
    lines = Path(f"/proc/{process_id}/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if "/moesaic-weights-" in line}


def deployment_of(alone: Alone, num_ranks: int) -> Deployment:
    """Nodes of two ranks, subtrees, two micro-batches, in one process's numerics; the backend is open."""
    active = alone.snapshot.active
    numerics = preset("portable", dtype=active["numerics"]["seam_dtype"], backend="auto")
    digest_of_spec = digest(read_spec(active["model"]))
    one = single_process(digest_of_spec, numerics, contiguous_plan((16,) * NUM_LAYERS, 1))
    instance = replace(
        one.instances[0],
        layout=data_parallel(
            num_ranks, dispatcher="two_level", returns="subtrees", num_micro_batches=2, ranks_per_node=2
        ),
        plan=contiguous_plan((16,) * NUM_LAYERS, num_ranks),
    )
    return replace(one, instances=(instance,))


@pytest.mark.parametrize(
    ("num_ranks", "tp", "expert_tp"),
    [
        (2, 2, 2),
        pytest.param(2, 2, 1, marks=pytest.mark.long),
        pytest.param(4, 2, 1, marks=pytest.mark.long),
        pytest.param(3, 3, 1, marks=pytest.mark.long),
        pytest.param(4, 2, 4, marks=pytest.mark.long),
    ],
)
def test_ranks_that_share_attention_answer_as_one_process_with_the_same_leaves(
    num_ranks: int, tp: int, expert_tp: int
) -> None:
    """Each has its own heads and experts, or slices of them; one of each replica tells the answers and counts
    the choices, each once."""
    leaves = OPTIONS | {"matmul_shards": 4}
    with LLM("demo", **leaves) as llm:
        alone = Alone(answers(llm), llm.engine.snapshot(), choices_of(llm))
    chunks = 2 if num_ranks == 2 else 1
    with LLM("demo", num_ranks=num_ranks, tp=tp, expert_tp=expert_tp, num_chunks=chunks, **leaves) as llm:
        assert answers(llm) == alone.answers
        found = llm.engine.snapshot()
        for name in ("model_digest", "numerics_digest", "backend"):
            assert found.active[name] == alone.snapshot.active[name]
        assert found.active["layout"]["num_chunks"] == chunks
        assert found.active["layout"]["attention"] == {"dp": num_ranks // tp, "kvp": 1, "tp": tp}
        assert found.active["layout"]["experts"] == {"ep": num_ranks // expert_tp, "tp": expert_tp}
        assert found.active["layout"]["num_slices"] == expert_tp
        assert found.active["layout"]["dispatcher"] in (
            ("gathered",) if num_ranks == tp else ("shared_memory", "exchange")
        )
        assert found.active["layout"]["tp_wires"] == ("shared_memory" if native.module() else "gloo")
        # Latent KV is whole on every rank.
        assert found.kv_bytes == found.active["kv"]["bytes"] == num_ranks * alone.snapshot.kv_bytes
        # Heads, widths and experts are shared: only what feeds all heads, embedding and head are there twice.
        assert found.weight_bytes < 1.5 * (num_ranks // tp) * alone.snapshot.weight_bytes
        assert choices_of(llm) == alone.choices


@pytest.mark.long
def test_slices_of_experts_answer_as_one_process_with_the_same_leaves() -> None:
    """Each rank has half of every expert; then, while it runs, any halves of any."""
    leaves = OPTIONS | {"matmul_shards": 2}
    with LLM("demo", **leaves) as llm:
        alone = Alone(answers(llm), llm.engine.snapshot(), choices_of(llm))
    with LLM("demo", num_ranks=2, expert_tp=2, **leaves) as llm:
        assert answers(llm) == alone.answers
        found = llm.engine.snapshot()
        for name in ("model_digest", "numerics_digest", "backend"):
            assert found.active[name] == alone.snapshot.active[name]
        layout = found.active["layout"]
        assert (layout["experts"], layout["num_slices"]) == ({"ep": 1, "tp": 2}, 2)
        assert (layout["dispatcher"], layout["is_fused"]) == data_parallel_of(2)
        assert any("experts are cut into 2 slices" in note for note in found.active["not_active"])
        assert [rank["experts_held"] for rank in found.active["ranks"]] == [16 * NUM_LAYERS] * 2
        # A choice counts once, not once a slice.
        assert choices_of(llm) == alone.choices
        rng = np.random.default_rng(2)
        plan = contiguous_plan((16,) * NUM_LAYERS, 2, 2)
        moved = replace(plan, slot_rank=tuple(rng.integers(0, 2, 32) for _ in plan.slot_rank))
        assert llm.adopt(moved).moved_bytes > 0
        assert answers(llm) == alone.answers
        with pytest.raises(ConfigError, match="it has whole experts, and in memory are experts in 2 slices"):
            llm.adopt(contiguous_plan((16,) * NUM_LAYERS, 2))


def data_parallel_of(num_ranks: int) -> tuple[str, bool]:
    """Dispatcher, and whether layers are fused, where nothing is said and experts are cut."""
    layout = data_parallel(num_ranks, has_slices=True, is_native=bool(native.levels()))
    return layout.dispatcher, layout.is_fused


def uneven_plan() -> ExpertPlan:
    """For two ranks, of which the second holds about 30 % of the slots; five experts a layer have a copy."""
    rng = np.random.default_rng(3)
    layers = [np.concatenate((rng.permutation(16), rng.integers(0, 16, 5))) for _ in range(NUM_LAYERS)]
    return ExpertPlan(
        version=4,
        slot_rank=tuple((rng.random(21) < 0.3).astype(np.int64) for _ in layers),
        slot_expert=tuple(layers),
        slot_slice=tuple(np.zeros(21, dtype=np.int64) for _ in layers),
        slot_share=tuple(1.0 / np.bincount(ids, minlength=16)[ids] for ids in layers),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot_expert": [[0] * 16]}, "same number of layers|it has 1 layers, the model has"),
        ({"version": "x"}, "version"),
        (None, "not valid JSON"),
    ],
)
def test_placements_that_do_not_fit_are_refused(
    tmp_path: Path, change: dict[str, Any] | None, message: str
) -> None:
    path = tmp_path / "plan.json"
    plan = to_plain(contiguous_plan((16,) * NUM_LAYERS, 2))
    path.write_text("{" if change is None else json.dumps(plan | change))
    with pytest.raises(ConfigError, match=message):
        LLM("demo", num_ranks=2, placement=str(path), **OPTIONS)


def test_a_placement_for_other_ranks_names_both_ways_out(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(to_plain(contiguous_plan((16,) * NUM_LAYERS, 4))))
    with pytest.raises(
        ConfigError, match=r"for 4 ranks, this engine has 2; ask for --ranks 4, or .* --gpus 2"
    ):
        LLM("demo", num_ranks=2, placement=str(path), **OPTIONS)
    with pytest.raises(ConfigError, match=r"--placement .* is for several ranks"):
        LLM("demo", num_ranks=1, placement=str(path), **OPTIONS)
    with pytest.raises(ConfigError, match=r"absent\.json: cannot be read"):
        LLM("demo", num_ranks=2, placement=str(tmp_path / "absent.json"), **OPTIONS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("launcher", "ray"),
        ("rank_address", "127.0.0.1:0"),
        ("replica_choice", "hash"),
        ("tp_wires", "gloo"),
    ],
)
def test_what_is_for_several_ranks_is_refused_on_one(name: str, value: str) -> None:
    flag = name.replace("_", "-")
    with pytest.raises(ConfigError, match=f"--{flag} {value} is for several ranks, and there is one"):
        LLM("demo", **OPTIONS, **{name: value})


def test_a_rank_that_dies_ends_every_request_with_its_name_and_leaves_no_process() -> None:
    llm = LLM("demo", num_ranks=2, **OPTIONS)
    processes = processes_of(llm.engine)
    ended: dict[str, RequestEvent] = {}
    requests = [transcript.request for transcript in llm._transcripts(list(PROMPTS), endless(), 1)]
    for request in requests:
        llm.engine.submit(request, lambda event: ended.update({event.request_id: event}))
    wait_until(lambda: len(ended) == len(requests))
    os.kill(processes[1].pid, signal.SIGKILL)
    wait_until(lambda: all(event.finish_reason is not None for event in ended.values()))
    for event in ended.values():
        assert event.finish_reason == "error"
        assert "rank 1 has ended" in str(event.error)
        assert "can be sent again" in str(event.error)
        assert event.is_retriable
    assert not llm.engine.snapshot().is_ready
    llm.close()
    assert all(process.poll() is not None for process in processes)
    assert not segments_left()


@needs_native
def test_messages_that_shared_memory_does_not_hold_are_refused_before_weights_are_read() -> None:
    with pytest.raises(
        CapacityError, match=r"2 ranks need \d+ bytes .* enlarge it .*lower max_tokens_per_step"
    ):
        LLM("demo", num_ranks=2, **OPTIONS, max_tokens_per_step=10**9)


def test_numbers_of_ranks_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"17 ranks for 16 experts a layer: .* use at most 16 ranks"):
        LLM("demo", num_ranks=17, **OPTIONS)
    with pytest.raises(ConfigError, match="num_ranks must be a whole number of at least 1, got 0"):
        LLM("demo", num_ranks=0, **OPTIONS)


def test_attention_that_cannot_be_shared_is_refused_before_a_process_starts() -> None:
    for wish, message in (
        ({"num_ranks": 2, "tp": 2}, "tp 2 splits each sum further than its 1 leaves: .* --matmul-shards 2"),
        ({"num_ranks": 3, "tp": 2}, r"3 mod 2 = 1; ask for --tp 1, 3, or for --ranks 2"),
        (
            {"num_ranks": 8, "tp": 8, "matmul_shards": 8},
            r"rank 0 of 8 would have 0 to 0.5 of 4 heads .* tp can be 1, 2, 4",
        ),
        (
            {"num_ranks": 2, "tp": 2, "matmul_shards": 4, "format": "int4-g64"},
            r"layer 1, down of an expert: .* 128 / 4 = 32 is not a multiple of 64",
        ),
        ({"num_ranks": 4, "tp": 2, "matmul_shards": 4, "dispatcher": "gathered"}, "ask for --tp 4"),
        ({"num_ranks": 2, "tp_wires": "gloo"}, "--tp-wires gloo is for ranks that share attention"),
        ({"num_ranks": 2, "tp_wires": "glue"}, "tp_wires 'glue' is unknown; known: gloo, shared_memory"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM("demo", **OPTIONS, **wish)


def endless() -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


def processes_of(engine: Engine) -> list[Any]:
    assert isinstance(engine._link, Ranks)
    return [one.process for one in engine._link._ranks if one.process is not None]


def wait_until(is_so: Any, timeout_s: float = 60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.02)
