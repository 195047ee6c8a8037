"""The table of `names.py`, filled: the server observes, the engine is asked when somebody scrapes.

One registry per application; no global state. Knows an engine only as two functions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from threading import Lock

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from moesaic.obs.load import skew, total_counts
from moesaic.obs.names import METRICS, WINDOW_S, Metric, metric
from moesaic.spec.experts import ExpertLoad, FloatArray, IntArray

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
Samples = list[tuple[tuple[str, ...], float]]


class Metrics:
    """What /metrics shows. Thread-safe.

    `moe_layers` are the layer indices that the entries of `ExpertLoad.counts` belong to.
    """

    def __init__(
        self,
        *,
        snapshot: Callable[[], object],
        expert_load: Callable[[float | None], Sequence[ExpertLoad]],
        moe_layers: Sequence[int],
        info: Mapping[str, str],
    ) -> None:
        self._snapshot = snapshot
        self._expert_load = expert_load
        self._moe_layers = tuple(moe_layers)
        self._info = tuple(info[label] for label in metric("moesaic_build_info").labels)
        self._lock = Lock()
        self._sums: dict[str, dict[tuple[str, ...], float]] = {}
        self._histograms = {m.name: _Histogram(m.buckets) for m in METRICS if m.kind == "histogram"}
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_Scrape(self._families))

    def add(self, name: str, *labels: str, value: float = 1.0) -> None:
        """Add to a counter or gauge of the server; labels in the table's order."""
        entry = metric(name)
        if len(labels) != len(entry.labels):
            raise ValueError(f"{name} has the labels {entry.labels}, got {labels}")
        with self._lock:
            series = self._sums.setdefault(name, {})
            series[labels] = series.get(labels, 0.0) + value

    def observe(self, name: str, value: float) -> None:
        """One value of a histogram."""
        with self._lock:
            self._histograms[name].observe(value)

    def render(self, names: Sequence[str] = ()) -> bytes:
        """The exposition text, of all families or of those whose series are named."""
        registry = self.registry.restricted_registry(names) if names else self.registry
        return generate_latest(registry)

    def _families(self) -> Iterator[Family]:
        snapshot = self._snapshot()
        expert_samples = self._expert_samples()
        with self._lock:
            sums = {name: dict(series) for name, series in self._sums.items()}
            histograms = {name: histogram.cumulative() for name, histogram in self._histograms.items()}
        for entry in METRICS:
            if entry.kind == "histogram":
                buckets, total = histograms[entry.name]
                family = HistogramMetricFamily(entry.name, entry.help)
                family.add_metric([], buckets, sum_value=total)
                yield family
            elif entry.snapshot is not None:
                yield _family(entry, _snapshot_samples(attrgetter(entry.snapshot)(snapshot)))
            elif entry.name == "moesaic_build_info":
                yield _family(entry, [(self._info, 1.0)])
            elif entry.name in expert_samples:
                yield _family(entry, expert_samples[entry.name])
            else:
                empty: dict[tuple[str, ...], float] = {} if entry.labels else {(): 0.0}
                yield _family(entry, list(sums.get(entry.name, empty).items()))

    def _expert_samples(self) -> dict[str, Samples]:
        tokens: Samples = []
        routed: Samples = []
        for load in self._expert_load(None):
            routed.append(((load.phase,), float(load.num_tokens)))
            tokens += [
                ((layer, expert_id, load.phase), value)
                for layer, expert_id, value in self._by_expert(load.counts)
            ]
        recent = self._expert_load(WINDOW_S)
        counts = total_counts(recent)
        num_tokens = sum(load.num_tokens for load in recent)
        shares = [layer_counts / max(num_tokens, 1) for layer_counts in counts]
        skews = [
            (str(layer), found)
            for layer, layer_counts in zip(self._moe_layers, counts, strict=False)
            if (found := skew(layer_counts)) is not None
        ]
        return {
            "moesaic_expert_tokens_total": tokens,
            "moesaic_routed_tokens_total": routed,
            "moesaic_expert_utilization_ratio": [
                ((layer, expert_id), value) for layer, expert_id, value in self._by_expert(shares)
            ],
            "moesaic_expert_load_max_mean_ratio": [((layer,), found.max_mean) for layer, found in skews],
            "moesaic_expert_load_variation_ratio": [((layer,), found.variation) for layer, found in skews],
        }

    def _by_expert(self, per_layer: Iterable[IntArray | FloatArray]) -> Iterator[tuple[str, str, float]]:
        for layer, values in zip(self._moe_layers, per_layer, strict=False):
            for expert_id, value in enumerate(values.tolist()):
                yield str(layer), str(expert_id), float(value)


class _Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """(upper bound, values up to it) for every bucket, and the sum of all values."""
        found, running = [], 0
        for bound, count in zip([*map(repr, self._bounds), "+Inf"], self._counts, strict=True):
            running += count
            found.append((bound, float(running)))
        return found, self._total


class _Scrape(Collector):
    def __init__(self, families: Callable[[], Iterator[Family]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Family]:
        return self._families()

    def describe(self) -> list[Family]:
        """Names for the registry's filter, without asking the engine."""
        return [
            HistogramMetricFamily(m.name, m.help) if m.kind == "histogram" else _family(m, [])
            for m in METRICS
        ]


def _snapshot_samples(value: float | Mapping[str, float] | None) -> Samples:
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [((label,), float(number)) for label, number in value.items()]
    return [((), float(value))]


def _family(entry: Metric, samples: Samples) -> Family:
    kind = CounterMetricFamily if entry.kind == "counter" else GaugeMetricFamily
    family = kind(entry.name, entry.help, labels=entry.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family
