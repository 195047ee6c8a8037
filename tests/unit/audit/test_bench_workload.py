"""Workloads: fixed lengths, prompts from a file, and traces with shared prefixes."""

import json

import pytest

from moesaic.audit.bench.workload import UNIFORM, PromptLoad, RandomLoad, TraceLoad, with_arrivals
from moesaic.errors import ConfigError


def test_random_prompts_differ_between_runs_and_repeat_by_seed():
    load = RandomLoad(num_prompts=3, input_len=5, output_len=7, vocab=50)
    first, second = load.workload(0), load.workload(1)
    assert [len(item.prompt) for item in first.items] == [5, 5, 5]
    assert {item.output_len for item in first.items} == {7}
    assert first == load.workload(0)
    assert first.items != second.items
    assert max(max(item.prompt) for item in first.items) < 50
    assert first.routing == UNIFORM
    assert "not realistic" in UNIFORM


def test_poisson_arrivals():
    load = with_arrivals(
        RandomLoad(num_prompts=4000, input_len=1, output_len=1, vocab=9).workload(0), 20.0, 3
    )
    times = [item.at_s for item in load.items]
    assert times[0] == 0.0
    assert times == sorted(times)
    assert 4000 / times[-1] == pytest.approx(20.0, rel=0.05)
    with pytest.raises(ConfigError, match="request-rate must be above 0"):
        with_arrivals(load, 0.0, 3)


def test_prompts_from_a_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo\n")
    load = PromptLoad.read(path, num_prompts=3, output_len=4).workload(0)
    assert [item.prompt for item in load.items] == ["one", "two", "one"]
    assert load.routing == "prompts of prompts.txt"
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    with pytest.raises(ConfigError, match=r"prompts\.jsonl, line 2: needs a text"):
        PromptLoad.read(path, num_prompts=1, output_len=1)


ROWS = [
    {"timestamp": 1000, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]},
    {"timestamp": 3000, "input_length": 1024, "output_length": 9, "hash_ids": [7, 9]},
    {"timestamp": 3500, "input_length": 600, "output_length": 900, "hash_ids": [7, 8]},
]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_trace_has_its_arrivals_lengths_and_prefixes(trace):
    load = TraceLoad.read(trace, num_prompts=10, vocab=500, speed=2.0).workload(0)
    a, b, c = (item.prompt for item in load.items)
    assert [item.at_s for item in load.items] == [0.0, 1.0, 1.25]
    assert [len(a), len(b), len(c)] == [1000, 1024, 600]
    assert [item.output_len for item in load.items] == [5, 9, 900]
    assert a[:512] == b[:512] == c[:512]
    assert a[512:600] == c[512:600]
    assert a[512:600] != b[512:600]


def test_trace_scaled_and_cut(trace):
    load = TraceLoad.read(trace, num_prompts=10, vocab=500, length_scale=0.01, max_model_len=14).workload(0)
    assert [len(item.prompt) for item in load.items] == [10, 10]
    assert load.items[0].prompt[:5] == load.items[1].prompt[:5]
    assert load.num_dropped == 1
    with pytest.raises(ConfigError, match="give --trace-scale below 1"):
        TraceLoad.read(trace, num_prompts=10, vocab=500, max_model_len=100).workload(0)
    assert len(TraceLoad.read(trace, num_prompts=2, vocab=500).rows) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"timestamp": 0, "input_length": 5, "hash_ids": [1]}, "line 1: has no 'output_length'"),
        (
            {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]},
            "need 2 hash_ids of 512",
        ),
        ({"timestamp": -1, "input_length": 6, "output_length": 1, "hash_ids": [1]}, "at least 0"),
        ([1], "must be a JSON object"),
    ],
)
def test_damaged_traces_are_refused(tmp_path, row, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=message):
        TraceLoad.read(path, num_prompts=1, vocab=5)


def test_files_that_are_no_workload(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        PromptLoad.read(tmp_path / "missing", num_prompts=1, output_len=1)
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        PromptLoad.read(tmp_path / "empty", num_prompts=1, output_len=1)
    with pytest.raises(ConfigError, match="output-len must be at least 1"):
        RandomLoad(num_prompts=1, input_len=1, output_len=0, vocab=5)


def test_a_recorded_trace(shared_data):
    path = shared_data / "traces" / "mooncake_conversation_trace.jsonl"
    load = TraceLoad.read(path, num_prompts=50, vocab=1000, length_scale=0.01).workload(0)
    assert len(load.items) == 50
    assert load.items[0].prompt[:5] == load.items[1].prompt[:5], (
        "the trace's first requests share a system prompt"
    )


def test_prompts_of_a_trace_without_ids_share_nothing(tmp_path):
    path = tmp_path / "trace.csv"
    rows = ["2023-11-16 18:15:46.5,600,3", "2023-11-16 18:15:47.0,600,4"]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    first, second = TraceLoad.read(path, num_prompts=5, vocab=500).workload(0).items
    assert (len(first.prompt), first.at_s, second.at_s, second.output_len) == (600, 0.0, 0.5, 4)
    assert first.prompt[:40] != second.prompt[:40]
    assert first.prompt[:40] != first.prompt[512:552]
