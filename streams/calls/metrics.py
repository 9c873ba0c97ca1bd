"""The gateway's Prometheus metrics, in their own registry.

Histograms of token times are plain lists of counts, because they are updated for every token.
Labels are few and bounded: outcomes are the error codes of `schemas/errors.py`, models are those of
the settings. What is counted by model is counted once for each answer, not for each token.
"""

from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from schemas.fleet import FleetView
from schemas.records import MemberKind, Wanted
from schemas.rules.buckets import Buckets, cumulative_counts
from streams.calls import retrieval_metrics
from streams.log.clock import wall_ms

_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)


class _Histogram(Buckets):
    def __init__(self, name: str, doc: str, bounds: Sequence[float]) -> None:
        super().__init__(bounds)
        self.name, self.doc = name, doc

    def family(self) -> HistogramMetricFamily:
        buckets = cumulative_counts(self.bounds, self.counts)
        return HistogramMetricFamily(self.name, self.doc, buckets=buckets, sum_value=self.sum)


class Metrics(Collector):
    """The collector of all metrics that /metrics shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.in_flight: Callable[[], int] = lambda: 0
        self.fleet: Callable[[], FleetView | None] = FleetView
        self._requests = Counter(
            "trivium_gateway_requests_total",
            "Calls by endpoint and outcome: completed, or the error's code.",
            ("endpoint", "outcome"),
            registry=self.registry,
        )
        self._tokens = self._counter("tokens", "Tokens received for live streams.")
        self._frames = self._counter("frames", "Token frames read.")
        self._repeated_rows = self._counter(
            "repeated_rows", "Rows dropped because nothing was new."
        )
        self._foreign_rows = self._counter("foreign_rows", "Rows of streams that nobody waits for.")
        self._differing_streams = self._counter(
            "differing_streams", "Streams of which something was repeated as other tokens."
        )
        self._undecodable = self._counter(
            "undecodable_records", "Records sent to the dead-letter topic."
        )
        self._cache = Counter(
            "trivium_gateway_cache_lookups_total",
            "Lookups of kept answers: hit, miss or failed; changed, where documents did.",
            ("outcome",),
            registry=self.registry,
        )
        self._ttft: dict[str, Buckets] = {}  # by model
        self._answers: Tally[tuple[str, str]] = Tally()  # by model and outcome
        self._answer_tokens: Tally[str] = Tally()  # by model
        self._inter_token = _Histogram(
            "trivium_gateway_inter_token_seconds",
            "Between tokens of one stream; tokens that arrive together share their time.",
            _INTER_TOKEN_S,
        )
        self.registry.register(self)

    def _counter(self, name: str, doc: str) -> Counter:
        return Counter(f"trivium_gateway_{name}_total", doc, registry=self.registry)

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "trivium_gateway_in_flight", "Choices being answered.", value=self.in_flight()
        )
        if (view := self.fleet()) is not None:
            now_ms = wall_ms()
            if (target := view.scaling_target_at(now_ms)) is not None:
                yield from _pools(target)
            living = view.living(MemberKind.WORKER, now_ms)
            yield from retrieval_metrics.families(tuple(living))
        yield from self._by_model()
        yield self._inter_token.family()

    def _by_model(self) -> Iterator[Metric]:
        ttft = HistogramMetricFamily(
            "trivium_gateway_first_token_seconds",
            "From arrival to the first token.",
            labels=("model",),
        )
        for model, buckets in self._ttft.items():
            counts = cumulative_counts(buckets.bounds, buckets.counts)
            ttft.add_metric([model], buckets=counts, sum_value=buckets.sum)
        answers = CounterMetricFamily(
            "trivium_gateway_answers",
            "Answers that have ended, by model or adapter, and outcome.",
            labels=("model", "outcome"),
        )
        for labels, count in self._answers.items():
            answers.add_metric(labels, count)
        tokens = CounterMetricFamily(
            "trivium_gateway_answer_tokens",
            "Tokens of answers that have ended, by model or adapter.",
            labels=("model",),
        )
        for model, count in self._answer_tokens.items():
            tokens.add_metric([model], count)
        yield from (ttft, answers, tokens)

    def count_outcome(self, endpoint: str, outcome: str) -> None:
        """Count a call by its endpoint and outcome."""
        self._requests.labels(endpoint, outcome).inc()

    def cache_lookup(self, outcome: str) -> None:
        """Count a lookup of a cached answer."""
        self._cache.labels(outcome).inc()

    def frame(
        self,
        *,
        tokens: int,
        foreign_rows: int,
        waits: Mapping[tuple[float, int], int],
        now_s: float,
    ) -> None:
        """Count an applied frame; `waits` counts its rows by the stream's last growth (s) and new
        tokens."""
        for (last_s, new), rows in waits.items():
            if last_s:
                self._inter_token.add((now_s - last_s) / new, new * rows)
        self._frames.inc()
        if tokens:
            self._tokens.inc(tokens)
        if foreign_rows:
            self._foreign_rows.inc(foreign_rows)

    def first_token(self, model: str, seconds: float) -> None:
        """Record the seconds from a call's arrival to its first token."""
        if (ttft := self._ttft.get(model)) is None:
            ttft = self._ttft[model] = Buckets(_TTFT_S)
        ttft.add(seconds)

    def answer(self, model: str, outcome: str, tokens: int) -> None:
        """Count an answer that has ended, and its tokens."""
        self._answers[model, outcome] += 1
        self._answer_tokens[model] += tokens

    def repeated_rows(self, rows: int) -> None:
        """Count rows that brought nothing new to a stream."""
        self._repeated_rows.inc(rows)

    def difference(self) -> None:
        """Count a stream in which an attempt repeated other tokens."""
        self._differing_streams.inc()

    def undecodable(self) -> None:
        """Count a record that could not be decoded."""
        self._undecodable.inc()

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def _pools(target: Wanted) -> Iterator[Metric]:
    """Yield the target and present workers by pool, as the autoscaler last wrote them."""
    target_workers = GaugeMetricFamily(
        "trivium_workers_wanted", "That a pool wants.", labels=("pool", "model")
    )
    present_workers = GaugeMetricFamily(
        "trivium_workers_present", "That a pool has.", labels=("pool", "model")
    )
    for pool in target.pools:
        target_workers.add_metric([pool.role.value, pool.model], pool.workers)
        present_workers.add_metric([pool.role.value, pool.model], pool.present)
    yield from (target_workers, present_workers)
