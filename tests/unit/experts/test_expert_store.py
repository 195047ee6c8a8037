"""Loading experts as tensors arrive, and what the store then hands out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moesaic.errors import CheckpointError, ConfigError, HostMemoryShort
from moesaic.experts.blob import BlobLayout, Part
from moesaic.experts.store import ExpertLoader, ResidentStore, arena_runs
from moesaic.kernels.huge_pages import HUGE_BYTES
from moesaic.kernels.panel import pack_panels
from moesaic.kernels.shared_bytes import SharedBytes
from moesaic.kernels.weight_memory import SharedMemory, WeightMemory
from moesaic.spec.experts import ExpertKey, ExpertPlan, contiguous_plan
from moesaic.spec.model import GateSpec, MoeSpec
from moesaic.spec.numerics import FormatMap, FormatPair
from moesaic.steps import drive

NUM_EXPERTS, WIDTH, INNER = 6, 24, 10
SPEC = MoeSpec(
    num_experts=NUM_EXPERTS,
    experts_per_token=2,
    expert_width=INNER,
    gate=GateSpec(score="softmax"),
    shared=None,
    row_width=WIDTH,
    has_bias=True,
)
LAYERS = ((1, SPEC), (4, SPEC))
FLOAT32 = FormatPair(weight="float32", activation="float32")
BFLOAT16 = FormatPair(weight="bfloat16", activation="bfloat16")
FORMATS = FormatMap(default=FLOAT32)


def make_tensors(seed: int = 0) -> dict[tuple[int, int, Part], Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        (layer_idx, logical_id, part): torch.randn(place.shape, generator=rng)
        for layer_idx, spec in LAYERS
        for logical_id in range(NUM_EXPERTS)
        for part, place in BlobLayout.of(spec, "float32").places.items()
    }


def load(formats: FormatMap = FORMATS, seed: int = 0, **options: Any) -> ResidentStore:
    loader = ExpertLoader(LAYERS, formats, **options)
    for (layer_idx, logical_id, part), tensor in make_tensors(seed).items():
        loader.put(layer_idx, logical_id, part, tensor)
    return loader.finish()


def one_slot(store: ResidentStore, layer_idx: int, slot: int, num_slots: int = NUM_EXPERTS) -> Any:
    offsets = torch.zeros(num_slots + 1, dtype=torch.int64)
    offsets[slot + 1 :] = 1
    (wave,) = store.waves(layer_idx, offsets)
    assert wave.slots == (slot,)
    return wave.table[slot]


def plan_of(slot_expert: list[int], slot_rank: list[int]) -> ExpertPlan:
    return ExpertPlan(
        version=7,
        slot_rank=(np.array(slot_rank),) * 2,
        slot_expert=(np.array(slot_expert),) * 2,
        slot_slice=(np.zeros(len(slot_expert), dtype=np.int64),) * 2,
        slot_share=(np.ones(len(slot_expert)),) * 2,
    )


# ---- loading ----


def test_tensors_in_any_order_land_in_their_places() -> None:
    tensors = make_tensors()
    keys = list(tensors)
    random.Random(3).shuffle(keys)
    loader = ExpertLoader(LAYERS, FORMATS)
    for layer_idx, logical_id, part in keys:
        loader.put(layer_idx, logical_id, part, tensors[layer_idx, logical_id, part])
    store = loader.finish()
    for layer_idx, _ in LAYERS:
        for slot in range(NUM_EXPERTS):
            weights = one_slot(store, layer_idx, slot)
            of = {part: tensors[layer_idx, slot, part] for part in loader.shapes(layer_idx)}
            assert torch.equal(weights.inner_FD, torch.cat((of["gate"], of["up"])))
            assert torch.equal(weights.inner_bias_F, torch.cat((of["gate_bias"], of["up_bias"])))
            assert torch.equal(weights.down_DF, of["down"])
            assert torch.equal(weights.down_bias_D, of["down_bias"])


def test_stacked_and_fused_and_transposed_tensors_stream_in() -> None:
    """gpt-oss' way: one tensor for all experts, gate and up interleaved, inner dim last."""
    tensors = make_tensors()
    loader = ExpertLoader(LAYERS, FORMATS)
    for layer_idx, _ in LAYERS:
        stack = {
            part: torch.stack([tensors[layer_idx, i, part] for i in range(NUM_EXPERTS)])
            for part in loader.shapes(layer_idx)
        }
        gate_up_EDF = (
            torch.stack((stack["gate"], stack["up"]), dim=2).flatten(1, 2).transpose(1, 2).contiguous()
        )
        loader.put_stack(layer_idx, "gate", gate_up_EDF[..., 0::2].transpose(1, 2))
        loader.put_stack(layer_idx, "up", gate_up_EDF[..., 1::2].transpose(1, 2))
        loader.put_stack(layer_idx, "down", stack["down"][:4])
        loader.put_stack(layer_idx, "down", stack["down"][4:], first_id=4)
        for part in ("gate_bias", "up_bias", "down_bias"):
            loader.put_stack(layer_idx, part, stack[part])
    store, expected = loader.finish(), load()
    for layer_idx, _ in LAYERS:
        for logical_id in range(NUM_EXPERTS):
            key = ExpertKey(layer_idx, logical_id)
            assert store.blob(key).digest == expected.blob(key).digest


def test_loading_holds_nothing_twice() -> None:
    """`put` makes views and copies into them; it allocates no tensor of its own."""
    loader = ExpertLoader(LAYERS, FormatMap(default=BFLOAT16))
    tensor = make_tensors()[1, 2, "down"]

    class Watch(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: set[str] = set()

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.add(func.__name__)
            return func(*args, **(kwargs or {}))

    with Watch() as watch:
        loader.put(1, 2, "down", tensor)
    facts = {"__get__", "is_floating_point", "element_size"}
    assert watch.seen - facts == {"__getitem__", "view", "copy_"}


def test_what_was_never_filled_is_named() -> None:
    loader = ExpertLoader(LAYERS, FORMATS)
    for (layer_idx, logical_id, part), tensor in make_tensors().items():
        if (layer_idx, logical_id) != (4, 5) or part == "up":
            loader.put(layer_idx, logical_id, part, tensor)
    with pytest.raises(CheckpointError) as error:
        loader.finish()
    assert "never filled: layer 4, expert 5, down; layer 4, expert 5, down_bias" in str(error.value)
    with pytest.raises(CheckpointError, match="and 66 more"):
        ExpertLoader(LAYERS, FORMATS).finish()


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (
            (1, 0, "gate", (WIDTH, INNER)),
            r"layer 1, expert 0, gate: expected shape \[10, 24\], found \[24, 10\]",
        ),
        ((1, 6, "gate", (INNER, WIDTH)), "layer 1, expert 6, gate: the layer has experts 0 to 5"),
        (
            (2, 0, "gate", (INNER, WIDTH)),
            r"layer 2 has no routed experts; the layers with experts are \[1, 4\]",
        ),
        ((1, 0, "gates", (INNER, WIDTH)), "no part 'gates'; did you mean gate"),
    ],
)
def test_wrong_tensors_are_refused(put: tuple[int, int, Any, tuple[int, ...]], message: str) -> None:
    layer_idx, logical_id, part, shape = put
    with pytest.raises(CheckpointError, match=message):
        ExpertLoader(LAYERS, FORMATS).put(layer_idx, logical_id, part, torch.zeros(shape))


def test_a_part_filled_twice_is_refused() -> None:
    loader = ExpertLoader(LAYERS, FORMATS)
    loader.put(1, 0, "up", torch.zeros(INNER, WIDTH))
    with pytest.raises(CheckpointError, match="layer 1, expert 0, up: filled a second time"):
        loader.put(1, 0, "up", torch.zeros(INNER, WIDTH))


def test_bytes_are_stated_before_and_after() -> None:
    loader = ExpertLoader(LAYERS, FORMATS)
    expected = 2 * NUM_EXPERTS * BlobLayout.of(SPEC, "float32").num_bytes
    assert loader.weight_bytes == expected
    assert load().weight_bytes == expected
    assert load(FormatMap(default=BFLOAT16)).weight_bytes < 0.6 * expected


def test_matrices_start_at_cache_lines_in_memory() -> None:
    store = load()
    for layer_idx, _ in LAYERS:
        for slot in range(NUM_EXPERTS):
            weights = one_slot(store, layer_idx, slot)
            assert weights.inner_FD.data_ptr() % 64 == 0
            assert weights.down_DF.data_ptr() % 64 == 0


def test_formats_belong_to_logical_experts() -> None:
    formats = FormatMap(default=BFLOAT16, by_expert={(4, 3): FLOAT32})
    store = load(formats)
    assert one_slot(store, 4, 3).inner_FD.dtype == torch.float32
    assert one_slot(store, 4, 2).inner_FD.dtype == torch.bfloat16
    assert one_slot(store, 1, 3).inner_FD.dtype == torch.bfloat16
    assert torch.equal(one_slot(store, 4, 3).down_DF, make_tensors()[4, 3, "down"])


def test_a_format_that_no_kernel_takes_is_refused() -> None:
    mixed = FormatMap(default=FormatPair(weight="bfloat16", activation="float32"))
    with pytest.raises(ConfigError, match="bfloat16 weights and float32 rows"):
        ExpertLoader(LAYERS, mixed)
    wide = FormatMap(default=FormatPair(weight="int4-g32", activation="bfloat16"))
    with pytest.raises(ConfigError, match=r"int4-g32 weights and bfloat16 rows.*use int8-g32 rows"):
        ExpertLoader(LAYERS, wide)


def test_experts_that_fit_nowhere_are_refused() -> None:
    huge = MoeSpec(
        num_experts=64,
        experts_per_token=2,
        expert_width=2**20,
        gate=SPEC.gate,
        shared=None,
        row_width=2**20,
    )
    with pytest.raises(HostMemoryShort, match=r"layer 0: 64 experts need 844 TB of memory"):
        ExpertLoader(((0, huge),), FORMATS)


# ---- ranks and plans ----


def test_a_rank_holds_its_own_experts_only() -> None:
    plan = contiguous_plan((NUM_EXPERTS, NUM_EXPERTS), 2)
    loader = ExpertLoader(LAYERS, FORMATS, plan=plan, rank=1)
    assert [loader.needs(1, i) for i in range(NUM_EXPERTS)] == [False] * 3 + [True] * 3
    store = load(plan=plan, rank=1)
    assert store.weight_bytes == load().weight_bytes // 2
    assert torch.equal(one_slot(store, 1, 2, num_slots=3).down_DF, make_tensors()[1, 5, "down"])
    with pytest.raises(ConfigError, match=r"rank 1 does not hold experts \[0\] of layer 1"):
        store.blob(ExpertKey(1, 0))


def test_a_second_copy_on_one_rank_is_a_pointer() -> None:
    store = load(plan=plan_of([2, 0, 2], [0, 0, 0]))
    first, second = (one_slot(store, 1, slot, num_slots=3) for slot in (0, 2))
    assert first.down_DF.data_ptr() == second.down_DF.data_ptr()
    assert store.weight_bytes == load().weight_bytes // 3


def test_adopt_points_slots_at_other_experts() -> None:
    store = load()
    drive([store.adopt(plan_of([5, 4, 3, 2, 1, 0], [0] * 6))], timeout_s=1.0)
    assert torch.equal(one_slot(store, 4, 0).down_DF, make_tensors()[4, 5, "down"])


def test_adopt_names_the_experts_it_lacks() -> None:
    store = load(plan=contiguous_plan((NUM_EXPERTS, NUM_EXPERTS), 2), rank=1)
    with pytest.raises(ConfigError) as error:
        drive([store.adopt(plan_of([0, 4, 1, 3, 5, 2], [1, 1, 0, 1, 0, 1]))], timeout_s=1.0)
    assert "version 7 puts experts on rank 1 that are not in its memory" in str(error.value)
    assert "layer 1: [0, 2]; layer 4: [0, 2]" in str(error.value)


def test_plans_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="version 0 has 1 layers, the model has 2 with experts"):
        ExpertLoader(LAYERS, FORMATS, plan=contiguous_plan((NUM_EXPERTS,), 1))
    with pytest.raises(ConfigError, match="does not divide an inner width of 10"):
        ExpertLoader(LAYERS, FORMATS, plan=contiguous_plan((NUM_EXPERTS,) * 2, 4, 4))
    cut = FormatMap(default=FormatPair(weight="int4-g32", activation="int8-g32"))
    with pytest.raises(ConfigError, match=r"10 / 2 = 5 is not a multiple of 32"):
        ExpertLoader(LAYERS, cut, plan=contiguous_plan((NUM_EXPERTS,) * 2, 2, 2))


def test_a_rank_keeps_its_slices_of_experts() -> None:
    """Rows of gate and up, columns of down, and of all experts the bias that is added to the whole sum."""
    plan, tensors, half = contiguous_plan((NUM_EXPERTS,) * 2, 4, 2), make_tensors(), INNER // 2
    stores = [load(plan=plan, rank=rank) for rank in range(4)]
    assert [store.held(1) for store in stores] == [(0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11)]
    for rank, store in enumerate(stores):
        first = half * (rank % 2)
        for slot in range(3):
            of = {part: tensors[4, 3 * (rank // 2) + slot, part] for part in ("gate", "up", "down")}
            weights = one_slot(store, 4, slot, num_slots=3)
            rows = slice(first, first + half)
            assert torch.equal(weights.inner_FD, torch.cat((of["gate"][rows], of["up"][rows])))
            assert torch.equal(weights.down_DF, of["down"][:, rows])
            assert weights.inner_bias_F.shape == (2 * half,)
            assert weights.down_bias_D is None
        biases = torch.stack([tensors[4, i, "down_bias"] for i in range(NUM_EXPERTS)])
        assert torch.equal(store.down_biases[4], biases)
    blob_bytes = BlobLayout.of(SPEC, "float32", 2).num_bytes
    assert stores[3].weight_bytes == 2 * (3 * blob_bytes + 4 * NUM_EXPERTS * WIDTH)
    assert stores[1].blob(ExpertKey(1, 2, 1)).data.numel() == blob_bytes
    with pytest.raises(ConfigError, match=r"rank 1 does not hold slices \[0 of expert 2\] of layer 1"):
        stores[1].blob(ExpertKey(1, 2, 0))
    with pytest.raises(ConfigError, match="into 1 slices, and those in memory are in 2"):
        drive([stores[0].adopt(contiguous_plan((NUM_EXPERTS,) * 2, 4))], timeout_s=1.0)


def test_slices_that_are_filled_twice_or_never_are_named() -> None:
    plan = contiguous_plan((NUM_EXPERTS,) * 2, 2, 2)
    loader = ExpertLoader(LAYERS, FORMATS, plan=plan, rank=1)
    assert loader.needs(1, 5, "up")
    with pytest.raises(CheckpointError, match=r"layer 1, expert 3, up: expected shape \[10, 24\], found"):
        loader.put(1, 3, "up", torch.zeros(INNER // 2, WIDTH))
    for part in ("up", "down_bias"):
        loader.put(1, 3, part, make_tensors()[1, 3, part])  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match=f"expert 3, {part}: filled a second time"):
            loader.put(1, 3, part, make_tensors()[1, 3, part])  # type: ignore[arg-type]
    with pytest.raises(
        CheckpointError, match="filled: layer 1, expert 0, down_bias; layer 1, expert 0, down;"
    ):
        loader.finish()


def test_rows_of_one_scale_are_rounded_before_they_are_cut() -> None:
    wide = MoeSpec(
        num_experts=2,
        experts_per_token=1,
        expert_width=128,
        gate=GateSpec(score="softmax"),
        shared=None,
        row_width=WIDTH,
    )
    rng = torch.Generator().manual_seed(1)
    down_DF = torch.randn((WIDTH, 128), generator=rng)
    down_DF[:, 100] = 9.0  # the largest of every row is in the last slice
    whole = pack_panels(down_DF, "int8").unpack().values()
    formats = FormatMap(default=FormatPair(weight="int8", activation="int8-g32"))
    for rank in range(2):
        loader = ExpertLoader(((0, wide),), formats, plan=contiguous_plan((2,), 2, 2), rank=rank)
        for logical_id in range(2):
            for part in ("gate", "up"):
                loader.put(0, logical_id, part, torch.zeros(128, WIDTH))
            loader.put(0, logical_id, "down", down_DF)
        down = one_slot(loader.finish(), 0, 0, num_slots=2).down_DF
        assert torch.equal(down.unpack().values(), whole[:, 64 * rank : 64 * rank + 64])


def test_waves() -> None:
    store = load()
    (wave,) = store.waves(1, torch.tensor([0, 2, 2, 3, 3, 3, 9]))
    assert wave.slots == (0, 2, 5)
    assert wave.ready.ready()
    assert list(store.waves(1, torch.zeros(NUM_EXPERTS + 1, dtype=torch.int64))) == []
    store.prefetch([ExpertKey(1, 3)])


# ---- where arenas lie ----


def test_experts_are_spread_over_nodes_in_runs_of_neighbours() -> None:
    bound: list[tuple[int, int, tuple[int, ...]]] = []

    def bind(data: Any, node_ids: Sequence[int]) -> None:
        bound.append((data.ctypes.data, data.nbytes, tuple(node_ids)))

    memory = WeightMemory((0, 3), bind=bind)
    spread, alone = load(memory=memory), load()
    blob_bytes = BlobLayout.of(SPEC, "float32").num_bytes
    assert [(size, nodes) for _, size, nodes in bound] == [(HUGE_BYTES, (0,)), (3 * blob_bytes, (3,))] * 2
    for layer_idx, start in ((1, 0), (4, 2)):
        for logical_id in range(NUM_EXPERTS):
            key = ExpertKey(layer_idx=layer_idx, logical_id=logical_id)
            assert spread.blob(key).digest == alone.blob(key).digest
            begin, size, _ = bound[start + logical_id // 3]
            assert begin <= spread.blob(key).data.data_ptr() < begin + size
        assert all(begin % HUGE_BYTES == 0 for begin, _, _ in bound)
    held = {layer_idx: range(NUM_EXPERTS) for layer_idx, _ in LAYERS}
    assert arena_runs(LAYERS, FORMATS, held, 2) == [[HUGE_BYTES, HUGE_BYTES]] * 2
    assert arena_runs(LAYERS, FORMATS, {1: (5,), 4: ()}, 2) == [[0, HUGE_BYTES], [0, 0]]


def test_on_one_node_blobs_lie_back_to_back_and_nothing_is_bound() -> None:
    def bind(data: Any, node_ids: Sequence[int]) -> None:
        raise AssertionError("there is nothing to choose")

    store = load(memory=WeightMemory((2,), bind=bind))
    blob_bytes = BlobLayout.of(SPEC, "float32").num_bytes
    places = [store.blob(ExpertKey(layer_idx=1, logical_id=i)).data.data_ptr() for i in range(NUM_EXPERTS)]
    assert [place - places[0] for place in places] == [i * blob_bytes for i in range(NUM_EXPERTS)]


def test_a_system_that_binds_nothing_is_quoted() -> None:
    def bind(data: Any, node_ids: Sequence[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    memory = WeightMemory((0, 1), bind=bind)
    assert load(memory=memory).weight_bytes > 0
    assert memory.refusal == "Operation not permitted"


def test_a_layer_that_is_refilled_leaves_shared_memory_and_is_spread_again(tmp_path: Path) -> None:
    """No byte of what is shared is written: it lies on pages that cannot be."""

    class Nothing:
        def layer(self, layer_idx: int, blob: Any, size: Any) -> Any:
            yield from ()
            return {}

    bound: list[tuple[int, ...]] = []
    shared = SharedBytes(tmp_path / "weights", 4 * HUGE_BYTES, lambda done, total: None)
    memory = SharedMemory(shared, (0, 1), bind=lambda data, node_ids: bound.append(tuple(node_ids)))
    store, alone = load(memory=memory), load()
    memory.finish({})
    drive([store.adopt(plan_of([5, 0, 3], [0, 0, 0]), Nothing())], 1.0)  # type: ignore[arg-type]  # a fake
    assert bound == [(0,), (1,)] * 4
    first, last = shared.data.ctypes.data, shared.data.ctypes.data + shared.num_bytes
    for key in (ExpertKey(layer_idx=layer_idx, logical_id=i) for layer_idx in (1, 4) for i in (0, 3, 5)):
        assert store.blob(key).digest == alone.blob(key).digest
        assert not first <= store.blob(key).data.data_ptr() < last
