"""Metrics of the retrieval workers, from the heartbeats that every gateway reads.

Counts begin at a worker's start. Replicas of a shard have the same rows, and each reports them.
"""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from schemas.fleet import Member
from schemas.records import SearchLoad
from schemas.rules.buckets import SEARCH_MS, cumulative_counts
from streams.calls.ids import STORE_PREFIX

_PREFIX = "trivium_retrieval"
_WORKER = ("worker", "shard")
_STORES = "vector stores"  # one label for all vector stores
_NO_SUMS = ("missed_share", "recall", "top_m")  # of several collections, the maximum counts
_BOUNDS_S = tuple(bound / 1_000 for bound in SEARCH_MS)
_OF_COLLECTIONS = (
    ("documents", "Documents of this shard."),
    ("rows", "Rows of the index, deleted ones too."),
    ("dead_rows", "Rows that are deleted and not compacted away yet."),
    ("loose_rows", "Rows that have no edges yet, so every search scans them."),
    ("bytes_held", "Memory of vectors, graph, codes, metadata and texts."),
    ("missed_share", "Of known rows, those that searches for them did not find in the last audit."),
    ("recall", "Recall that searches aim at; 0: none, the routing list has a fixed length."),
    ("top_m", "Entries of the routing list of a search that names none."),
)


def families(workers: Sequence[Member]) -> Iterator[Metric]:
    """Yield the metrics of workers that have a shard and have reported a load; none without such
    workers."""
    loads = {
        (member.member_id, str(member.registration.search.shard)): member.search
        for member in workers
        if member.search is not None and member.registration.search is not None
    }
    if loads:
        yield from _searches(loads)
        yield from _standing(loads)
        yield from _collections(loads)


_Loads = Mapping[tuple[str, str], SearchLoad]


def _searches(loads: _Loads) -> Iterator[Metric]:
    labels = (*_WORKER, "class")
    searches = CounterMetricFamily(
        f"{_PREFIX}_searches", "Retrievals by outcome: completed, or the error's code.",
        labels=(*labels, "outcome"),
    )  # fmt: skip
    waits = HistogramMetricFamily(
        f"{_PREFIX}_wait_seconds", "From a search's arrival to its slot.", labels=labels
    )
    times = HistogramMetricFamily(
        f"{_PREFIX}_search_seconds", "From reading a retrieval to its hits.", labels=labels
    )
    for worker, load in loads.items():
        for tally in load.tallies:
            place = [*worker, tally.kind]
            for outcome, count in tally.outcomes.items():
                searches.add_metric([*place, outcome], count)
            if len(tally.waits) == len(tally.times) == len(_BOUNDS_S) + 1:
                waits.add_metric(
                    place, cumulative_counts(_BOUNDS_S, tally.waits), tally.waited_ms / 1_000
                )
                times.add_metric(
                    place, cumulative_counts(_BOUNDS_S, tally.times), tally.took_ms / 1_000
                )
    yield from (searches, waits, times)


def _standing(loads: _Loads) -> Iterator[Metric]:
    waiting = GaugeMetricFamily(
        f"{_PREFIX}_waiting", "Searches that wait for a slot.", labels=(*_WORKER, "class")
    )
    running = GaugeMetricFamily(f"{_PREFIX}_running", "Searches in slots.", labels=_WORKER)
    parked = GaugeMetricFamily(
        f"{_PREFIX}_parked", "Of these, those that made way for urgent ones.", labels=_WORKER
    )
    missed = CounterMetricFamily(
        f"{_PREFIX}_deadline_misses", "Retrievals whose deadline had passed.", labels=_WORKER
    )
    behind = GaugeMetricFamily(
        f"{_PREFIX}_records_behind", "Records of documents and passages that are not in indexes.",
        labels=_WORKER,
    )  # fmt: skip
    held_back = CounterMetricFamily(
        f"{_PREFIX}_feed_held_back_seconds",
        "For which documents and passages waited until rows had edges.", labels=_WORKER,
    )  # fmt: skip
    for worker, load in loads.items():
        waiting.add_metric([*worker, "prefill"], load.waiting_prefill)
        waiting.add_metric([*worker, "decode"], load.waiting_decode)
        running.add_metric(worker, load.running)
        parked.add_metric(worker, load.parked)
        missed.add_metric(worker, load.misses_total)
        behind.add_metric(worker, load.behind)
        held_back.add_metric(worker, load.held_back_ms / 1_000)
    yield from (waiting, running, parked, missed, behind, held_back)


def _collections(loads: _Loads) -> Iterator[Metric]:
    """Yield the metrics of collections. All vector stores share one label: their ids belong to
    their tenants, and the process that scrapes may be none of these."""
    for name, doc in _OF_COLLECTIONS:
        family = GaugeMetricFamily(f"{_PREFIX}_{name}", doc, labels=(*_WORKER, "collection"))
        for worker, load in loads.items():
            values: dict[str, list[float]] = {}
            for state in load.collections:
                label = _STORES if state.name.startswith(STORE_PREFIX) else state.name
                values.setdefault(label, []).append(getattr(state, name))
            for label, several in values.items():
                together = max(several) if name in _NO_SUMS else sum(several)
                family.add_metric([*worker, label], together)
        yield family
