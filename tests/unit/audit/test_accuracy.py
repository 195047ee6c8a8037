from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moesaic.audit.accuracy import accuracy, cases_of
from moesaic.audit.perf_rows import COLUMNS, machine_of, preset_of, read_perf_rows
from moesaic.cost.calibrated import HELD_OUT, predict, shipped
from moesaic.cost.correction import middle_load
from moesaic.errors import ConfigError

GOOD = {
    "id": "a", "backend": "vllm", "model_path": "MiniMaxAI/MiniMax-M2.5", "system": "h200_sxm", "mode": "agg",
    "isl": "1024", "osl": "1024", "gemm_quant_mode": "fp8", "moe_quant_mode": "fp8", "batch_size": "16",
    "tp_size": "8", "pp_size": "1", "attention_dp_size": "1", "moe_tp_size": "8", "moe_ep_size": "1",
    "silicon_ttft_ms": "120", "silicon_tpot_ms": "11.5",
}  # fmt: skip


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture
def rows_path(tmp_path: Path) -> Path:
    batches = [4, 8, 16, 32, 64, 128]
    rows = [
        GOOD | {"id": f"m{batch}", "batch_size": str(batch), "silicon_tpot_ms": str(8 + batch / 5)}
        for batch in batches
    ]
    dense = {"model_path": "nvidia/Llama-3.1-8B-Instruct-FP8", "tp_size": "1", "moe_tp_size": "1", "id": "d"}
    return write(tmp_path / "rows.csv", [*rows, GOOD | dense])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_path": "nobody/Nothing"}, "model without a preset"),
        ({"system": "z9_sxm"}, "machine without a file"),
        ({"backend": "other"}, "unknown backend"),
        ({"moe_quant_mode": "fp3"}, "unknown weight format"),
        ({"mode": "disagg"}, "disaggregated: lengths, batch or tensor parallelism missing"),
        ({"batch_size": ""}, "lengths, batch or tensor parallelism missing"),
        ({"batch_size": "inf"}, "lengths, batch or tensor parallelism missing"),
        ({"isl": "1e99"}, "lengths over 10 times the model's positions"),
        ({"osl": "9e9"}, "lengths over 10 times the model's positions"),
        ({"batch_size": "1e30"}, "batch over 65536 sequences a replica"),
        ({"silicon_tpot_ms": "nan"}, "no measured time"),
        ({"pp_size": "2"}, "pipeline parallelism"),
        ({"tp_size": "64", "moe_tp_size": "8", "moe_ep_size": "8"}, "more devices than one node or rack has"),
        ({"tp_size": "5", "moe_tp_size": "5"}, "heads not divisible by tensor parallelism"),
        (
            {"moe_ep_size": "3", "tp_size": "3", "moe_tp_size": "1"},
            "experts not divisible by expert parallelism",
        ),
        ({"moe_tp_size": "2"}, "attention and experts have different numbers of ranks"),
        (
            {"tp_size": "16", "moe_tp_size": "16", "system": "gb200"},
            "experts sliced thinner than a block of their scales",
        ),
    ],
)
def test_unusable_rows_are_counted_by_reason(tmp_path: Path, change: dict[str, str], reason: str) -> None:
    table = read_perf_rows(write(tmp_path / "rows.csv", [GOOD, GOOD | change]))
    assert len(table.rows) == 1
    assert table.dropped == {reason: 1}


def test_pools_that_only_decode_are_a_table_of_their_own(tmp_path: Path) -> None:
    names = ("batch_size", "tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    apart = GOOD | {"mode": "disagg"} | {f"decode_{name}": GOOD[name] for name in names}
    apart |= dict.fromkeys(names, "") | {"isl": "8192", "silicon_tpot_ms": "9"}
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, *(f"decode_{name}" for name in names)])
        writer.writeheader()
        dense = {
            "model_path": "meta-llama/Llama-3.1-8B",
            "decode_moe_tp_size": "1",
            "decode_moe_ep_size": "1",
        }
        writer.writerows([GOOD, GOOD | {"isl": "8192"}, apart, apart | dense])
    table = read_perf_rows(path)
    assert (len(table.rows), len(table.decoders)) == (2, 1)
    assert table.dropped == {"disaggregated: dense model": 1}
    (alone,) = table.decoders
    assert (alone.batch, alone.tp, alone.expert_tp) == (16, 8, 8)
    found = accuracy(path)
    assert (found.moe["tpot"].n, found.decoders["tpot"].n, set(found.decoders)) == (2, 1, {"tpot"})
    ((_, case),) = cases_of(table.decoders)
    one = predict(case.model, case.cluster, case.split, case.traffic, backend="vllm", formats=case.formats,
                  calibration=shipped(without=case.group))  # fmt: skip
    assert one.decode_s.value[0] < one.tpot_s.value[0]  # no prompts between its steps
    assert found.decoders["tpot"].median_ape == pytest.approx(abs(one.decode_s.value[0] / 0.009 - 1))


def test_cleaning_never_looks_at_measured_times(tmp_path: Path) -> None:
    absurd = GOOD | {"silicon_ttft_ms": "1e9", "silicon_tpot_ms": "1e-9"}
    assert len(read_perf_rows(write(tmp_path / "rows.csv", [GOOD, absurd])).rows) == 2


def test_ids_of_models_and_machines() -> None:
    assert preset_of("nvidia/DeepSeek-V3.1-NVFP4") == preset_of("deepseek-ai/DeepSeek-R1") == "deepseek-v3"
    assert preset_of("Qwen/Qwen3-235B-A22B-FP8") == "qwen3-235b-a22b"
    assert preset_of("zhipuai/GLM-5") == "glm-5"
    assert (machine_of("h200_sxm"), machine_of("gb200"), machine_of("l40s"), machine_of("q1")) == (
        "h200", "gb200", "l40s", None,
    )  # fmt: skip


def test_left_out_attention_replicas_follow_from_the_experts(tmp_path: Path) -> None:
    row = GOOD | {"tp_size": "2", "attention_dp_size": "", "moe_tp_size": "1", "moe_ep_size": "8"}
    (found,) = read_perf_rows(write(tmp_path / "rows.csv", [row])).rows
    assert (found.tp, found.dp, found.ep, found.expert_tp) == (2, 4, 8, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "lacks the columns id"),
        ("id,mode\n1,agg\n", "lacks the columns backend"),
        (None, "not a readable CSV"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "rows.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_perf_rows(path)


def test_a_file_without_usable_rows_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no usable row \\(model without a preset: 1\\)"):
        accuracy(write(tmp_path / "rows.csv", [GOOD | {"model_path": "x"}]))


def test_figures_against_ones_computed_by_hand(rows_path: Path, tmp_path: Path) -> None:
    found = accuracy(rows_path)
    rows = read_perf_rows(rows_path).rows
    ape = []
    for ids, case in cases_of(rows):
        one = predict(
            case.model, case.cluster, case.split, case.traffic, backend=case.backend, formats=case.formats,
            calibration=shipped(without=case.group),
        )  # fmt: skip
        if case.model.moe_layers:
            ape += [abs(v / rows[i].tpot_s - 1) for i, v in zip(ids, one.tpot_s.value, strict=True)]
    assert found.moe["tpot"].n == 6
    assert found.moe["tpot"].median_ape == pytest.approx(np.median(ape))
    assert found.moe["tpot"].p90_ape == pytest.approx(np.quantile(ape, 0.9))
    assert found.moe["tpot"].rank_corr == pytest.approx(1.0)
    assert found.dense["tpot"].n == 1
    peer = tmp_path / "peer.csv"
    peer.write_text("id,ttft,tpot\nm4,120,8.8\nm8,,\nm16,240,22.4\n")
    theirs = accuracy(rows_path, peer).peer
    assert theirs["tpot"].n == 2
    assert theirs["tpot"].median_ape == pytest.approx(0.5)  # 0 and 1
    assert theirs["ttft"].median_ape == pytest.approx(0.5)
    assert theirs["tpot"].coverage_80 is None


def test_a_group_is_predicted_by_a_fit_without_it() -> None:
    with_all, without = shipped(), shipped(without="minimax-m2|h200")
    assert with_all.numbers != without.numbers
    assert shipped(without="nobody|h200").numbers == with_all.numbers


def test_the_command_line(rows_path: Path) -> None:
    command = [sys.executable, "-m", "moesaic", "accuracy", "--rows", str(rows_path)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["n"] == 7
    assert set(found["tpot"]) == {"n", "median_ape", "p90_ape", "coverage_80", "width", "rank_corr"}
    assert set(found) >= {"dropped", "ttft", "dense", "peer"}
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "mixture-of-experts models" in text
    missing = subprocess.run([*command[:-1], "/nowhere.csv"], capture_output=True, text=True)
    assert missing.returncode == 2
    assert "not a readable CSV file" in missing.stderr


def test_targets_on_the_public_rows(shared_data: Path) -> None:
    """What docs/accuracy.md says, on groups that were never fitted; a bound that may only go down."""
    folder = shared_data / "perf"
    found = accuracy(folder / "measured_e2e.csv.gz", folder / "aiconfigurator_predictions.csv.gz")
    kept = found.num_rows / found.num_aggregated
    assert kept >= 0.85
    ours, peer = found.ours_shared, found.peer
    assert found.moe["tpot"].median_ape < 0.12
    assert found.moe["tpot"].p90_ape < 0.5
    assert found.moe["ttft"].median_ape < 0.25
    assert ours["tpot"].p90_ape < 0.75 * peer["tpot"].p90_ape
    for target in ("tpot", "ttft"):
        assert ours[target].median_ape < peer[target].median_ape
        assert ours[target].p90_ape < peer[target].p90_ape
        assert 0.75 < found.moe[target].coverage_80 < 0.85
        assert found.moe[target].width < 2.2
        assert found.moe[target].rank_corr > 0.85
    assert found.decoders["tpot"].n > 100
    assert found.decoders["tpot"].median_ape < 1.5 * found.moe["tpot"].median_ape


def test_no_group_is_predicted_by_a_fit_that_saw_it() -> None:
    """A fit that starts from one of all rows keeps what it should not know: every group's numbers differ."""
    with_all = shipped().numbers
    fitted = json.loads(HELD_OUT.read_text())
    assert len(fitted) > 20
    for name in fitted:
        found = shipped(without=name).numbers
        assert max(abs(found[key] / with_all[key] - 1) for key in with_all) > 1e-4, name


def test_the_planners_page_tells_how_wrong_its_times_are(shared_data: Path) -> None:
    """As a plan says it: no engine, the level of the correction on TPOT; each row without its group."""
    page = (Path(__file__).parents[3] / "docs" / "planner.md").read_text()
    text = r"median\s+error\s+is\s+(\d+) % of TPOT and (\d+) % of TTFT, and they hold (\d+) %\s+and\s+(\d+) %"
    found = re.search(text, page)
    assert found, "the page says it in other words"
    rows = read_perf_rows(shared_data / "perf" / "measured_e2e.csv.gz").rows
    errors: dict[str, list[np.ndarray]] = {"tpot": [], "ttft": []}
    held: dict[str, list[np.ndarray]] = {"tpot": [], "ttft": []}
    for ids, case in cases_of(rows):
        if not case.model.moe_layers:
            continue
        fitted = shipped(without=case.group)
        about = (case.model, case.cluster, case.formats)
        times = predict(
            case.model, case.cluster, case.split, case.traffic, formats=case.formats, calibration=fitted
        ).phases
        load = middle_load(prompt=case.traffic.prompt, output=case.traffic.output)
        level = np.exp(fitted.log_ratios("tpot", *about, load))
        for target, value in (("tpot", times.tpot_s * level), ("ttft", times.ttft_s)):
            measured = np.array([getattr(rows[idx], f"{target}_s") for idx in ids])
            low, high = fitted.factors(target, *about, sort="plan")
            errors[target].append(np.abs(value / measured - 1.0))
            held[target].append((value * low <= measured) & (measured <= value * high))
    exact = [float(np.median(np.concatenate(errors[target]))) for target in errors]
    exact += [float(np.mean(np.concatenate(held[target]))) for target in held]
    assert [int(one) / 100 for one in found.groups()] == pytest.approx(exact, abs=0.0051)
