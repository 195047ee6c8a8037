"""A request's logits have the same bits alone, among neighbours, chunked, whole, and after a prefix hit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import CONFIGS, write_checkpoint
from family_configs import FAMILY_CONFIGS
from paged import PagedModel, random_tokens
from torch import Tensor

from moesaic.experts.contract import Routing
from moesaic.kernels.ops import backends, default_backend
from moesaic.kernels.state_view import StateView
from moesaic.kv.pool import BatchLayout
from moesaic.models.build import LoadedModel, load
from moesaic.spec.model import LinearSpec
from moesaic.spec.numerics import Effect, KvFormat

PROMPT = random_tokens(70, 256, seed=11)  # past every window of the test configs
CONTINUATION = random_tokens(8, 256, seed=12)
# Every family on the backend that users get here (known parts with the long tests), and two on all others.
LONG = {"qwen3_5_moe", *FAMILY_CONFIGS} - {"granitemoe", "phimoe"}
CASES = [
    pytest.param((family, default_backend()), marks=[pytest.mark.long] if family in LONG else [])
    for family in CONFIGS
] + [
    (family, backend)
    for family in ("olmoe", "deepseek_v3")
    for backend in backends()
    if backend != default_backend()
]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def model(
    request: pytest.FixtureRequest, dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> LoadedModel:
    family, backend = request.param
    folder = write_checkpoint(
        tmp_path_factory.mktemp("model"), CONFIGS[family](), dtype=getattr(torch, dtype)
    )
    loaded = load(folder, num_threads=1, backend=backend)
    assert (loaded.numerics.seam_dtype, loaded.ops.name) == (dtype, backend)
    return loaded


@pytest.fixture(scope="module")
def alone(model: LoadedModel) -> tuple[Tensor, Tensor]:
    """Logits of the prompt, computed in one step, and of the continuation, token by token."""
    paged = PagedModel(model)
    return paged.run("r", PROMPT), paged.run("r", CONTINUATION, chunk=1)


@pytest.mark.parametrize("chunk", [7, 33])
def test_chunked_is_whole(model: LoadedModel, alone: tuple[Tensor, Tensor], chunk: int) -> None:
    prefill, decode = alone
    paged = PagedModel(model, seed=1)
    assert torch.equal(paged.run("r", PROMPT, chunk=chunk), prefill)
    assert torch.equal(paged.run("r", CONTINUATION, chunk=3), decode)


def test_one_by_one_is_whole_though_each_expert_has_one_row(
    model: LoadedModel, alone: tuple[Tensor, Tensor]
) -> None:
    rows_seen: list[set[int]] = []

    def observe(moe_idx: int, routing: Routing) -> None:
        rows_seen.append(set(routing.experts_TK.flatten().bincount().tolist()))

    paged = PagedModel(model)
    single = torch.cat([paged.step(("r", [token]), observe=observe)[0] for token in PROMPT])
    assert torch.equal(single, alone[0])
    assert len(rows_seen) == len(PROMPT) * len(model.spec.moe_layers)
    assert all(rows <= {0, 1} for rows in rows_seen)
    rows_seen.clear()
    paged.step(("s", PROMPT), observe=observe)
    assert all(max(rows) > 8 for rows in rows_seen)


def test_neighbours_change_nothing(model: LoadedModel, alone: tuple[Tensor, Tensor]) -> None:
    prefill, decode = alone
    paged = PagedModel(model, seed=2)
    paged.run("old", random_tokens(45, 256, seed=20))
    for before, after in ((5, 1), (0, 40), (60, 3)):
        name = f"r{before}"
        rows = [
            (f"x{name}", random_tokens(before, 256, seed=21)),
            (name, PROMPT),
            ("old", [3]),
            (f"y{name}", random_tokens(after, 256, seed=22)),
        ]
        rows = [(other, tokens) for other, tokens in rows if tokens]
        logits = dict(zip((other for other, _ in rows), paged.step(*rows), strict=True))
        assert torch.equal(logits[name], prefill)
    for i, token in enumerate(CONTINUATION):  # decode among decodes and a prefill, in another order each time
        rows = [
            ("old", [i]),
            ("r5", [token]),
            ("r0", [token]),
            ("new", random_tokens(i * 5 + 1, 256, seed=i)),
        ]
        rows = rows[i % 4 :] + rows[: i % 4]
        logits = dict(zip((name for name, _ in rows), paged.step(*rows), strict=True))
        assert torch.equal(logits["r5"][-1], decode[i])
        assert torch.equal(logits["r0"][-1], decode[i])


def test_a_prefix_in_the_pool_changes_nothing(model: LoadedModel, alone: tuple[Tensor, Tensor]) -> None:
    if any(isinstance(layer.mixer, LinearSpec) for layer in model.spec.layers):
        pytest.skip("a running state cannot be cut at a block: such models find no prefixes")
    prefill, decode = alone
    paged = PagedModel(model, seed=3)
    paged.step(("other", random_tokens(9, 256, seed=30)), ("first", [*PROMPT[:60], 1, 2, 3]))
    paged.fork("first", "r", 48)
    assert torch.equal(paged.run("r", PROMPT[48:]), prefill[48:])
    assert torch.equal(paged.run("r", CONTINUATION), decode)


def test_what_blocks_and_slots_held_before_changes_nothing(
    model: LoadedModel, alone: tuple[Tensor, Tensor]
) -> None:
    prefill, decode = alone
    paged = PagedModel(model, seed=4)
    for layer_idx, layer in enumerate(model.spec.layers):
        if layer.mixer is not None:
            view = paged.pool.view(layer_idx, BatchLayout.of([], paged.pool))
            if isinstance(view, StateView):
                held = [view.states, view.tails]
            else:  # the last block is the pool's own zero block
                held = [view.key_pool[:-1], *([] if view.value_pool is None else [view.value_pool[:-1]])]
            for tensor in held:
                tensor.fill_(float("nan"))
    assert torch.equal(paged.run("r", PROMPT, chunk=40), prefill)
    assert torch.equal(paged.run("r", CONTINUATION, chunk=3), decode)


@pytest.mark.parametrize("what", ["blocks", "states"])
def test_the_comparison_can_fail(model: LoadedModel, alone: tuple[Tensor, Tensor], what: str) -> None:
    prefill, _ = alone
    paged = PagedModel(model)
    paged.run("r", PROMPT[:64])
    paged.run("other", random_tokens(64, 256, seed=40))
    one, other = paged.sequences["r"], paged.sequences["other"]
    if what == "states":
        if not one.states:
            pytest.skip("no layer keeps a state")
        one.states[1] = other.states[1]  # read by the next step
    else:
        group_idx = next(i for i, group in enumerate(paged.pool.groups) if group.kind != "state")
        one.blocks[group_idx][3] = other.blocks[group_idx][3]
    assert not torch.equal(paged.run("r", PROMPT[64:]), prefill[64:])


def test_an_idle_step_computes_nothing(model: LoadedModel) -> None:
    paged = PagedModel(model)
    seen: list[int] = []
    assert paged.step(observe=lambda moe_idx, routing: seen.append(len(routing.experts_TK))) == []
    assert seen == [0] * len(model.spec.moe_layers)


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3"])
def test_backends_agree_within_a_tolerance(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS[family]())
    logits = {
        name: PagedModel(load(folder, num_threads=1, backend=name)).run("r", PROMPT) for name in backends()
    }
    for found in logits.values():
        torch.testing.assert_close(found, logits["reference"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
@pytest.mark.parametrize(
    ("family", "backend"),
    [(family, backends()[-1]) for family in ("olmoe", "deepseek_v3", "qwen3_next")]
    # Running states on the reference are slow, and differ in nothing that these do not show.
    + [(family, "reference") for family in ("olmoe", "deepseek_v3")],
)
def test_rounded_keys_and_values_keep_the_promise(
    family: str, backend: str, kv_format: KvFormat, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS[family](), dtype=torch.bfloat16)
    model = load(folder, num_threads=1, backend=backend, kv_format=kv_format)
    assert model.numerics.effects() == ((f"kv={kv_format}", Effect.LOSSY),)
    exact = load(folder, num_threads=1, backend=backend)
    assert exact.numerics.effects() == ()
    paged = PagedModel(model)
    assert paged.pool.num_bytes < PagedModel(exact).pool.num_bytes
    prefill, decode = paged.run("r", PROMPT), paged.run("r", CONTINUATION, chunk=1)
    chunked = PagedModel(model, seed=1)
    assert torch.equal(chunked.run("r", PROMPT, chunk=7), prefill)
    assert torch.equal(chunked.run("r", CONTINUATION), decode)
    expected = PagedModel(exact).run("r", PROMPT)
    assert not torch.equal(prefill, expected), "the format must do something"
    # Of random weights, whose routers are often near a tie: another expert is chosen here and there.
    assert (prefill - expected).norm() < 0.3 * expected.norm()
