"""A simulated engine beside measured requests: vLLM on a machine, and a run, that nothing was fitted to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moesaic.cost.calibrated import DATA
from moesaic.planner.load_file import skewed
from moesaic.planner.question import format_choices
from moesaic.planner.sim.serve import simulate_serve
from moesaic.planner.sim.setup import EngineParts, limits_for, split_for
from moesaic.spec.families import read_config
from moesaic.spec.hardware import cluster
from moesaic.spec.locate import locate
from moesaic.spec.workload import TraceRow


@pytest.mark.long
def test_three_hundred_measured_requests(shared_data: Path) -> None:
    lines = (shared_data / "perf" / "llmservingsim" / "requests.jsonl").read_text().splitlines()
    measured = sorted(map(json.loads, lines), key=lambda one: one["queued_ts"])
    start_s = measured[0]["queued_ts"]
    rows = [
        TraceRow(
            at_s=one["queued_ts"] - start_s,
            prompt_tokens=one["input_toks"],
            output_tokens=one["output_toks"],
        )
        for one in measured
    ]
    model, machines = read_config(locate("qwen3-30b-a3b").config, name="x"), cluster("rtx-pro-6000x2")
    assert "rtx-pro-6000" not in DATA.read_text()
    formats = format_choices(model, "stored", "bfloat16", None)[0].formats
    parts = EngineParts(model, machines, "calibrated", formats, skewed(model))
    split = split_for(model, machines, {"dp": 2, "ep": 2}, parts, one_replica=False)
    limits = limits_for(
        model, max_num_seqs=128, max_tokens_per_step=2048, max_model_len=None, max_waiting=None
    )
    found = simulate_serve(parts.engine(split, limits), rows)
    assert found.num_finished == len(rows) == 300
    tpot = [(one["last_token_ts"] - one["first_token_ts"]) / (one["output_toks"] - 1) for one in measured]
    latency = [one["last_token_ts"] - one["queued_ts"] for one in measured]
    first = [one["first_token_ts"] - one["queued_ts"] for one in measured]
    assert found.tpot_s is not None
    assert found.tpot_s.mean == pytest.approx(np.mean(tpot), rel=0.1)
    assert found.latency_s is not None
    assert found.latency_s.mean == pytest.approx(np.mean(latency), rel=0.1)
    assert found.latency_s.p[99] == pytest.approx(np.percentile(latency, 99), rel=0.1)
    assert found.ttft_s is not None
    assert found.ttft_s.p[99] == pytest.approx(np.percentile(first, 99), rel=0.5)
