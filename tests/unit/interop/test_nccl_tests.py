from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.errors import ConfigError
from moesaic.interop.nccl_tests import Row, bus_bandwidth, judge, peak_bandwidth, read_results
from moesaic.spec.hardware import cluster

TEXT = (Path(__file__).parents[2] / "samples" / "alltoall_h100x8.txt").read_text()


def rows(busbw: float, num_ranks: int = 8, num_wrong: int = 0) -> tuple[Row, ...]:
    algbw = busbw * num_ranks / (num_ranks - 1)
    return (Row(size_bytes=2**30, time_s=2**30 / algbw, algbw=algbw, busbw=busbw, num_wrong=num_wrong),)


def test_results_are_read_with_their_ranks():
    num_ranks, found = read_results(TEXT)
    assert num_ranks == 8
    assert [row.size_bytes for row in found] == [16777216, 67108864, 1073741824]
    assert found[2].time_s == pytest.approx(2760e-6)
    for row in found:
        assert row.algbw == pytest.approx(row.size_bytes / row.time_s, rel=1e-3)
        assert row.busbw == pytest.approx(bus_bandwidth(row.algbw, 8), rel=1e-3)


@pytest.mark.parametrize(
    ("busbw", "machine", "verdict"),
    [
        (340e9, "h100x8", "good"), (200e9, "h100x8", "slow"), (460e9, "h100x8", "impossible"),
        (180e9, "h800x8", "good"), (340e9, "h800x8", "impossible"),
    ],
)  # fmt: skip
def test_verdicts_follow_the_link(busbw, machine, verdict):
    assert judge(8, rows(busbw), cluster(machine)).verdict == verdict


def test_other_faults_come_first():
    assert judge(8, rows(340e9, num_wrong=3), cluster("h100x8")).verdict == "wrong"
    found = judge(8, rows(340e9, num_ranks=4), cluster("h100x8"))  # four ranks' factor on eight
    assert found.verdict == "impossible"
    assert "x 7/8" in found.reason


def test_a_threshold_has_to_be_below_the_peak():
    found = judge(8, rows(340e9), cluster("h100x8"), at_least=300e9)
    assert (found.verdict, found.peak, found.bound_by) == ("good", 450e9, "link")
    with pytest.raises(ConfigError, match="is never met"):
        judge(8, rows(340e9), cluster("h100x8"), at_least=450e9)


def test_across_nodes_the_network_bounds():
    peak, bound = peak_bandwidth(cluster("h100x8x2"), 16)
    assert bound == "network"
    assert peak == pytest.approx(50e9 * 15 / 8)  # half of what leaves a rank leaves its node
    assert peak_bandwidth(cluster("h100x8"), 8) == (450e9, "link")


def test_what_is_no_result_is_refused():
    with pytest.raises(ConfigError, match="no line of sizes"):
        read_results("# nothing")
    with pytest.raises(ConfigError, match="says not how many ranks"):
        read_results("\n".join(line for line in TEXT.splitlines() if "Rank" not in line))
