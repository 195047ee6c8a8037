"""The tree: what it adds to what, and that its pieces give the bits of the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moesaic.parallel.tree import (
    Subtrees,
    combine_choices,
    combine_subtrees,
    evaluate_subtrees,
    join_subtrees,
    tree_sum,
    weigh,
)

FLOAT32 = torch.float32


def random_leaves(num_leaves: int, width: int = 257, seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(width, generator=rng) for _ in range(num_leaves)]


def is_same(a: Tensor, b: Tensor) -> bool:
    """Equal bits: -0.0 is not 0.0."""
    return a.dtype == b.dtype and a.numpy().tobytes() == b.numpy().tobytes()


DRAWN = {
    1: lambda a: a,
    2: lambda a, b: a + b,
    3: lambda a, b, c: (a + b) + c,
    4: lambda a, b, c, d: (a + b) + (c + d),
    5: lambda a, b, c, d, e: ((a + b) + (c + d)) + e,
    6: lambda a, b, c, d, e, f: ((a + b) + (c + d)) + (e + f),
    7: lambda a, b, c, d, e, f, g: ((a + b) + (c + d)) + ((e + f) + g),
    8: lambda a, b, c, d, e, f, g, h: ((a + b) + (c + d)) + ((e + f) + (g + h)),
}


@pytest.mark.parametrize("num_leaves", DRAWN)
def test_neighbours_pair_up(num_leaves: int) -> None:
    leaves = random_leaves(num_leaves)
    assert is_same(tree_sum(leaves), DRAWN[num_leaves](*leaves))
    assert is_same(tree_sum([*leaves, *[None] * (8 - num_leaves)]), tree_sum(leaves))


@pytest.mark.parametrize("num_leaves", [4, 6, 8])
def test_a_fold_from_the_left_is_another_sum(num_leaves: int) -> None:
    leaves = random_leaves(num_leaves)
    folded = leaves[0]
    for leaf in leaves[1:]:
        folded = folded + leaf
    assert not is_same(tree_sum(leaves), folded)


def test_an_absent_leaf_is_skipped_and_never_added_as_zero() -> None:
    minus_zero = torch.tensor([-0.0])
    assert is_same(tree_sum([minus_zero, None]), minus_zero)
    assert is_same(tree_sum([None, None, None, minus_zero]), minus_zero)
    assert not is_same(minus_zero + torch.zeros(1), minus_zero)  # what adding a zero would do
    a, b, c = random_leaves(3)
    assert is_same(tree_sum([a, None, b, c]), a + (b + c))


def test_a_sum_of_nothing_is_an_error() -> None:
    with pytest.raises(AssertionError, match="at least one leaf"):
        tree_sum([None, None])


def make_choices(
    num_tokens: int, num_choices: int, width: int, dtype: torch.dtype = FLOAT32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [J, D] in a shuffled order, where each choice's is, and the weights."""
    rng = torch.Generator().manual_seed(seed)
    out_JD = torch.randn(num_tokens * num_choices, width, generator=rng).to(dtype)
    job_TK = torch.randperm(num_tokens * num_choices, generator=rng).view(num_tokens, num_choices)
    return out_JD, job_TK, torch.rand(num_tokens, num_choices, generator=rng)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_choices", [1, 2, 3, 4, 5, 6, 7, 8])
def test_choices_are_rounded_weighed_and_added_by_the_tree(num_choices: int, dtype: torch.dtype) -> None:
    out_JD, job_TK, weights_TK = make_choices(37, num_choices, 48, dtype)
    y_TD = combine_choices(out_JD, job_TK, weights_TK, partial=FLOAT32, seam=dtype)
    for t in range(37):
        leaves = [out_JD[job].float() * weight for job, weight in zip(job_TK[t], weights_TK[t], strict=True)]
        assert torch.equal(y_TD[t], tree_sum(leaves).to(dtype))


def test_without_weights_the_outputs_are_the_leaves() -> None:
    out_JD, job_TK, _ = make_choices(9, 4, 16)
    y_TD = combine_choices(out_JD, job_TK, None, partial=FLOAT32, seam=FLOAT32)
    assert is_same(y_TD, tree_sum([out_JD[job_TK[:, k]] for k in range(4)]))


def test_tiles_do_not_show() -> None:
    """300 tokens of 8 choices and width 512 are three tiles."""
    out_JD, job_TK, weights_TK = make_choices(300, 8, 512)
    y_TD = combine_choices(out_JD, job_TK, weights_TK, partial=FLOAT32, seam=FLOAT32)
    leaves = [out_JD[job_TK[:, k]] * weights_TK[:, k, None] for k in range(8)]
    assert is_same(y_TD, tree_sum(leaves))


def test_no_tokens() -> None:
    out_JD, job_TK, weights_TK = make_choices(0, 8, 16)
    y_TD = combine_choices(out_JD, job_TK, weights_TK, partial=FLOAT32, seam=torch.bfloat16)
    assert y_TD.shape == (0, 16)
    assert y_TD.dtype == torch.bfloat16
    nothing = evaluate_subtrees(out_JD, job_TK.flatten(), job_TK.flatten(), 8)
    assert combine_subtrees([nothing], 0, 8, seam=FLOAT32).shape == (0, 16)


def test_products_are_rounded_before_they_are_added() -> None:
    """Fusing a product with a sum rounds once instead of twice, and gives other bits: two choices show it."""
    out_JD, job_TK, weights_TK = make_choices(64, 2, 64)
    y_TD = combine_choices(out_JD, job_TK, weights_TK, partial=FLOAT32, seam=FLOAT32)
    first, second = (out_JD[job_TK[:, k]].double() * weights_TK[:, k, None].double() for k in range(2))
    fused = (first.float().double() + second).float()
    assert (y_TD != fused).float().mean() > 0.05
    assert is_same(y_TD, first.float() + second.float())


def test_inner_nodes_have_the_partial_dtype() -> None:
    out_JD, job_TK, weights_TK = make_choices(64, 8, 64)
    narrow = combine_choices(out_JD, job_TK, weights_TK, partial=torch.bfloat16, seam=FLOAT32)
    wide = combine_choices(out_JD, job_TK, weights_TK, partial=FLOAT32, seam=FLOAT32)
    assert (narrow != wide).float().mean() > 0.9
    assert torch.equal(narrow, narrow.bfloat16().float())


# ---- subtrees ----


def split_choices(
    owner_TK: np.ndarray, leaf_TKD: Tensor, num_owners: int, rng: np.random.Generator
) -> list[Subtrees]:
    """What each owner sends; jobs stand in any order."""
    parts = []
    for owner in range(num_owners):
        token_J, choice_J = map(torch.from_numpy, np.nonzero(owner_TK == owner))
        order = torch.from_numpy(rng.permutation(len(token_J)))
        token_J, choice_J = token_J[order], choice_J[order]
        parts.append(evaluate_subtrees(leaf_TKD[token_J, choice_J], token_J, choice_J, leaf_TKD.shape[1]))
    return parts


@settings(max_examples=60)
@given(
    num_choices=st.integers(1, 9),
    num_tokens=st.integers(1, 6),
    num_owners=st.integers(1, 5),
    seed=st.integers(0, 2**20),
)
def test_subtrees_of_any_owners_give_the_bits_of_the_whole(
    num_choices: int, num_tokens: int, num_owners: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    leaf_TKD = torch.randn(num_tokens, num_choices, 33, generator=torch.Generator().manual_seed(seed))
    owner_TK = rng.integers(0, num_owners, (num_tokens, num_choices))
    parts = split_choices(owner_TK, leaf_TKD, num_owners, rng)
    y_TD = combine_subtrees(parts, num_tokens, num_choices, seam=FLOAT32)
    assert is_same(y_TD, tree_sum(leaf_TKD.unbind(1)))


@pytest.mark.parametrize(
    ("num_choices", "owned", "roots"),
    [
        (8, [0, 1, 2, 3, 4, 5, 6, 7], [(3, 0)]),
        (8, [0, 1, 2, 3], [(2, 0)]),
        (8, [2, 3, 4, 5], [(1, 1), (1, 2)]),  # neighbours, but of no common parent below the root
        (8, [1, 2], [(0, 1), (0, 2)]),
        (8, [1, 2, 3, 6, 7], [(0, 1), (1, 1), (1, 3)]),
        (6, [4, 5], [(2, 1)]),  # 45 has no sibling on level 1 and moves up as it is
        (6, [0, 1, 4], [(0, 4), (1, 0)]),
        (6, [0, 1, 2, 3, 4, 5], [(3, 0)]),
        (5, [4], [(2, 1)]),
        (1, [0], [(0, 0)]),
    ],
)
def test_roots_are_the_largest_whole_subtrees(
    num_choices: int, owned: list[int], roots: list[tuple[int, int]]
) -> None:
    """(level, node) of what a rank sends that owns these choices of one token."""
    choice_J = torch.tensor(owned)
    leaf_JD = torch.randn(len(owned), 4)
    found = evaluate_subtrees(leaf_JD, torch.zeros_like(choice_J), choice_J, num_choices)
    assert sorted(zip(found.level_Q.tolist(), found.node_Q.tolist(), strict=True)) == roots
    assert (found.token_Q == 0).all()


@settings(max_examples=40)
@given(num_choices=st.integers(1, 9), num_owners=st.integers(2, 5), seed=st.integers(0, 2**20))
def test_subtrees_joined_on_the_way_are_those_of_one_owner(
    num_choices: int, num_owners: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    leaf_TKD = torch.randn(5, num_choices, 7, generator=torch.Generator().manual_seed(seed))
    owner_TK = rng.integers(0, num_owners, (5, num_choices))
    *near, far = split_choices(owner_TK, leaf_TKD, num_owners, rng)
    fields = ("token_Q", "level_Q", "node_Q", "value_QD")
    given_roots = Subtrees(**{name: torch.cat([getattr(one, name) for one in near]) for name in fields})
    joined = join_subtrees(given_roots, num_choices)
    # As if those owners were one, which sends the fewest values that say it all.
    (expected, _) = split_choices(np.where(owner_TK == num_owners - 1, 1, 0), leaf_TKD, 2, rng)
    assert all(is_same(getattr(joined, name), getattr(expected, name)) for name in fields)
    y_TD = combine_subtrees([joined, far], 5, num_choices, seam=FLOAT32)
    assert is_same(y_TD, tree_sum(leaf_TKD.unbind(1)))


def test_a_lost_subtree_is_noticed() -> None:
    leaf_TKD = torch.randn(3, 4, 8)
    parts = split_choices(np.array([[0, 0, 1, 1]] * 3), leaf_TKD, 2, np.random.default_rng(0))
    with pytest.raises(AssertionError, match="subtrees cover 6 choices of 12"):
        combine_subtrees(parts[:1], 3, 4, seam=FLOAT32)


def test_one_partial_sum_per_owner_is_another_sum() -> None:
    """Negative control: owners that hold no whole subtrees must send their leaves apart."""
    leaves = random_leaves(8)
    owned, rest = [0, 3, 4, 6], [1, 2, 5, 7]
    per_rank = sum((leaves[i] for i in owned[1:]), leaves[0]) + sum((leaves[i] for i in rest[1:]), leaves[1])
    assert not is_same(per_rank, tree_sum(leaves))


def test_leaves_are_products_in_float32() -> None:
    out_JD = torch.randn(5, 8).bfloat16()
    weight_J = torch.rand(5)
    assert torch.equal(weigh(out_JD, weight_J, FLOAT32), out_JD.float() * weight_J[:, None])
    assert torch.equal(weigh(out_JD, None, FLOAT32), out_JD.float())
