import numpy as np
import pytest

from moesaic.planner.compare import CLOSE, Ranking
from moesaic.planner.match import KIND, Choices


def no_plan(_):
    raise AssertionError("a ranking asks for no plan")


def choices(rng, num):
    """Deployments of one build with many ties."""
    kind = np.ones((num, len(KIND)))
    kind[:, KIND.index("ep")] = rng.choice([1, 8, 16], num)
    kind[:, KIND.index("pp")] = rng.choice([1, 2], num)
    return Choices(
        value=rng.uniform(0.95, 1.0, num), prefill_ep=rng.choice([1.0, 4.0], num),
        prefill_pp=rng.choice([1.0, 2.0], num), kind=kind, ttft_s=np.ones(num),
        tpot_s=rng.uniform(0.9, 1.0, num), in_flight=np.ones(num), alone=rng.uniform(0.9, 1.0, (num, 2)),
        make=no_plan,
    )  # fmt: skip


def taken(builds):
    """(build, row) that the rule names, by sifting lists."""

    def near(rows, worth):
        most = max(worth(row) for row in rows)
        return [row for row in rows if worth(row) >= most * (1 - CLOSE)]

    rows = near([(one, idx) for one in builds for idx in range(len(one.value))], lambda r: r[0].value[r[1]])
    left = []
    for one in builds:
        mine = [row for row in rows if row[0] is one]
        for phase in (0, 1):
            mine = near(mine, lambda r, phase=phase: r[0].alone[r[1], phase]) if mine else []
        left += mine

    def size(row):
        one, idx = row
        decode = [one.kind[idx, KIND.index(knob)] for knob in ("pp", "ep")]
        return [*decode, one.prefill_pp[idx], one.prefill_ep[idx]]

    left = [row for row in left if size(row) == min(size(row) for row in left)]
    shortest = min(one.tpot_s[idx] for one, idx in left)
    left = [row for row in left if row[0].tpot_s[row[1]] <= shortest * (1 + CLOSE)]
    one, idx = max(left, key=lambda row: row[0].value[row[1]])
    return builds.index(one), idx


def test_the_answer_among_equals_is_the_one_that_sifting_finds():
    rng = np.random.default_rng(0)
    for _ in range(200):
        builds = [choices(rng, int(rng.integers(1, 25))) for _ in range(3)]
        ranking = Ranking.of(builds)
        assert (ranking.owner[ranking.best], ranking.inner[ranking.best]) == taken(builds)


def of(value, alone, ep, tpot_s):
    """Deployments by hand."""
    num = len(value)
    kind = np.ones((num, len(KIND)))
    kind[:, KIND.index("ep")] = ep
    return Choices(
        value=np.array(value), prefill_ep=np.ones(num), prefill_pp=np.ones(num), kind=kind,
        ttft_s=np.ones(num), tpot_s=np.array(tpot_s), in_flight=np.ones(num),
        alone=np.array([alone, [1.0] * num]).T, make=no_plan,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "alone", "ep", "tpot_s", "best"),
    [
        ([1.0, 0.99], [1.0, 1.0], [16, 8], [1.0, 1.0], 1),  # equal: the smaller
        ([1.0, 0.97], [1.0, 1.0], [16, 8], [1.0, 1.0], 0),  # not equal
        ([1.0, 0.99], [1.0, 0.7], [16, 8], [1.0, 1.0], 0),  # its decode pool is worse by itself
        ([1.0, 0.99], [1.0, 1.0], [8, 8], [1.0, 0.8], 1),  # as large: the faster
        ([1.0, 0.99], [1.0, 1.0], [8, 8], [1.0, 0.99], 0),  # as large and as fast: the one worth more
        ([1.0, 0.9], [1.0, 2.0], [8, 8], [1.0, 0.5], 0),  # a good pool does not pay for the whole
    ],
)
def test_what_decides_between_two(value, alone, ep, tpot_s, best):
    assert Ranking.of([of(value, alone, ep, tpot_s)]).best == best
