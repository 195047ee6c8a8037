"""The exposition text against the table of names, and against the counters it comes from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fakes import FakeEngine
from prometheus_client.parser import text_string_to_metric_families

from moesaic.obs.metrics import Metrics
from moesaic.obs.names import METRICS, SPANS, metric

INFO = {"version": "0.1.0", "model": "demo", "backend": "reference", "numerics_digest": "abc"}


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close()


@pytest.fixture
def metrics(engine: FakeEngine) -> Metrics:
    return Metrics(snapshot=engine.snapshot, expert_load=engine.expert_load, moe_layers=(1, 2), info=INFO)


def samples(metrics: Metrics, *names: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render(names).decode())
        for sample in family.samples
    }


def fill(metrics: Metrics) -> None:
    for entry in METRICS:
        if entry.kind == "histogram":
            metrics.observe(entry.name, 0.02)
        elif entry.snapshot is None and entry.name.startswith(("moesaic_http", "moesaic_requests")):
            metrics.add(entry.name, *("x" for _ in entry.labels))


def test_output_equals_the_table(metrics: Metrics) -> None:
    fill(metrics)
    families = {f.name: f for f in text_string_to_metric_families(metrics.render().decode())}
    assert set(families) == {
        m.name.removesuffix("_total") if m.kind == "counter" else m.name for m in METRICS
    }
    for entry in METRICS:
        family = families[entry.name.removesuffix("_total") if entry.kind == "counter" else entry.name]
        assert family.type == entry.kind
        assert family.documentation == entry.help
        assert family.samples, entry.name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(entry.labels)


def test_names_follow_the_conventions() -> None:
    names = [entry.name for entry in METRICS]
    assert len(names) == len(set(names))
    for entry in METRICS:
        assert entry.name.startswith("moesaic_")
        assert entry.name.endswith("_total") == (entry.kind == "counter")
        if entry.unit:
            assert entry.name.removesuffix("_total").endswith(entry.unit)
        assert bool(entry.buckets) == (entry.kind == "histogram")
        assert list(entry.buckets) == sorted(set(entry.buckets))
        assert entry.help.endswith(".")
        if "expert_id" in entry.labels:
            assert entry.name.startswith("moesaic_expert_")
    assert len({span.name for span in SPANS}) == len(SPANS)


def test_values_equal_the_engines_counters(metrics: Metrics, engine: FakeEngine) -> None:
    found = samples(metrics)
    for load in engine.expert_load(None):
        assert found["moesaic_routed_tokens_total", (("phase", load.phase),)] == load.num_tokens
        for layer, counts in zip((1, 2), load.counts, strict=True):
            for expert_id, count in enumerate(counts):
                labels = (("expert_id", str(expert_id)), ("layer", str(layer)), ("phase", load.phase))
                assert found["moesaic_expert_tokens_total", labels] == count
    labels = (("expert_id", "3"), ("layer", "1"))
    assert found["moesaic_expert_utilization_ratio", labels] == pytest.approx(1.0)
    assert found["moesaic_expert_load_max_mean_ratio", (("layer", "1"),)] == pytest.approx(2.0)
    assert found["moesaic_kv_blocks", ()] == 64
    for span, seconds in engine.snapshot().span_seconds_total.items():
        assert found["moesaic_step_seconds_total", (("span", span),)] == seconds
    assert set(engine.snapshot().span_seconds_total) == {span.name for span in SPANS}
    assert found["moesaic_engine_ready", ()] == 1
    assert engine.windows[:2] == [None, 60.0]


def test_histograms_are_cumulative(metrics: Metrics) -> None:
    name = "moesaic_time_per_output_token_seconds"
    for value in (0.0005, 0.001, 0.03, 99.0):
        metrics.observe(name, value)
    found = samples(metrics)
    assert found[f"{name}_bucket", (("le", "0.001"),)] == 2
    assert found[f"{name}_bucket", (("le", "0.05"),)] == 3
    assert found[f"{name}_bucket", (("le", "+Inf"),)] == 4
    assert found[f"{name}_count", ()] == 4
    assert found[f"{name}_sum", ()] == pytest.approx(99.0315)


def test_counters_add_and_labels_are_checked(metrics: Metrics) -> None:
    metrics.add("moesaic_requests_total", "stop")
    metrics.add("moesaic_requests_total", "stop")
    metrics.add("moesaic_http_requests_in_flight", value=1)
    metrics.add("moesaic_http_requests_in_flight", value=-1)
    found = samples(metrics)
    assert found["moesaic_requests_total", (("finish_reason", "stop"),)] == 2
    assert found["moesaic_http_requests_in_flight", ()] == 0
    with pytest.raises(ValueError, match="has the labels"):
        metrics.add("moesaic_requests_total")
    with pytest.raises(KeyError):
        metric("moesaic_nothing")


def test_one_family_can_be_asked_for(metrics: Metrics) -> None:
    assert set(samples(metrics, "moesaic_steps_total")) == {("moesaic_steps_total", ())}
    assert samples(metrics, "nothing") == {}
