"""What /metrics shows of the retrieval pool."""

import re
from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from schemas.fleet import FleetView
from schemas.records import (
    CollectionState,
    Heartbeat,
    Load,
    MemberKind,
    MemberState,
    Registration,
    Role,
    SearchCapability,
    SearchLoad,
    SearchTally,
)
from schemas.rules.buckets import SEARCH_MS, Buckets
from streams.calls.metrics import Metrics
from streams.log.clock import wall_ms
from tests.import_graph import ROOT
from tests.streams.gateway.in_process import InProcessGateway

PREFIX = "trivium_retrieval_"
BOOKS = CollectionState(
    name="books", dim=2, metric="cosine", documents=5, missed_share=0.25, rows=8, dead_rows=3,
    loose_rows=2, bytes_held=4_096, recall=0.95, top_m=77,
)  # fmt: skip


def tally() -> SearchTally:
    waits, times = Buckets(SEARCH_MS), Buckets(SEARCH_MS)
    for ms in (0.25, 32):
        waits.add(ms)
        times.add(2 * ms)
    return SearchTally(
        kind="decode", outcomes={"completed": 2, "deadline_exceeded": 1}, waits=waits.counts,
        waited_ms=waits.sum, times=times.counts, took_ms=times.sum,
    )  # fmt: skip


LOAD = SearchLoad(
    running=4, parked=1, waiting_prefill=6, waiting_decode=7, misses_total=1, behind=9,
    collections=(BOOKS,), tallies=(tally(),), held_back_ms=1_500,
)  # fmt: skip


def fleet(load: SearchLoad | None = LOAD, shard: int = 1) -> FleetView:
    """One worker, which is known by its records alone."""
    view, now_ms = FleetView(), wall_ms()
    view.apply(
        Registration(
            member_id="r", epoch=1, kind=MemberKind.WORKER, roles=(Role.RETRIEVAL,), started_ms=0,
            search=SearchCapability(shard=shard, shards=2, backend="cpu", slots=32),
        ), 0, now_ms,
    )  # fmt: skip
    view.apply(
        Heartbeat(
            member_id="r", epoch=1, seq=1, at_ms=now_ms, state=MemberState.READY, load=Load(),
            search=load,
        ), 1, now_ms,
    )  # fmt: skip
    return view


def render(view: FleetView | None) -> str:
    metrics = Metrics()
    metrics.fleet = lambda: view
    return metrics.render().decode()


def test_metrics_show_retrieval_heartbeats() -> None:
    text = render(fleet())
    of, books = 'shard="1",worker="r"', 'collection="books",shard="1",worker="r"'
    for line in (
        f'searches_total{{class="decode",outcome="completed",{of}}} 2.0',
        f'searches_total{{class="decode",outcome="deadline_exceeded",{of}}} 1.0',
        f'wait_seconds_bucket{{class="decode",le="0.00025",{of}}} 1.0',
        f'wait_seconds_bucket{{class="decode",le="0.025",{of}}} 1.0',
        f'wait_seconds_bucket{{class="decode",le="0.05",{of}}} 2.0',
        f'wait_seconds_bucket{{class="decode",le="+Inf",{of}}} 2.0',
        f'wait_seconds_sum{{class="decode",{of}}} 0.03225',
        f'search_seconds_count{{class="decode",{of}}} 2.0',
        f'search_seconds_sum{{class="decode",{of}}} 0.0645',
        f'waiting{{class="prefill",{of}}} 6.0',
        f'waiting{{class="decode",{of}}} 7.0',
        f"running{{{of}}} 4.0",
        f"parked{{{of}}} 1.0",
        f"deadline_misses_total{{{of}}} 1.0",
        f"records_behind{{{of}}} 9.0",
        f"feed_held_back_seconds_total{{{of}}} 1.5",
        f"documents{{{books}}} 5.0",
        f"rows{{{books}}} 8.0",
        f"dead_rows{{{books}}} 3.0",
        f"loose_rows{{{books}}} 2.0",
        f"bytes_held{{{books}}} 4096.0",
        f"missed_share{{{books}}} 0.25",
        f"recall{{{books}}} 0.95",
        f"top_m{{{books}}} 77.0",
    ):
        assert _sorted_labels(f"trivium_retrieval_{line}") in _lines(text)


def _lines(text: str) -> set[str]:
    return {_sorted_labels(line) for line in text.splitlines() if not line.startswith("#")}


def _sorted_labels(line: str) -> str:
    name, brace, rest = line.partition("{")
    labels, _, value = rest.rpartition("}")
    return f"{name}{{{','.join(sorted(labels.split(',')))}}}{value}" if brace else line


def test_metrics_omit_absent_retrieval_pool() -> None:
    for view in (None, FleetView(), fleet(None)):
        assert "trivium_retrieval" not in render(view)
    silent_fleet = fleet()
    silent_fleet.members["r"].seen_ms -= 60_000
    assert "trivium_retrieval" not in render(silent_fleet)


def test_metrics_omit_histograms_with_other_bounds() -> None:
    foreign_tally = replace(tally(), waits=(1, 2), times=(1, 2))
    text = render(fleet(replace(LOAD, tallies=(foreign_tally,))))
    assert "trivium_retrieval_searches_total" in text
    assert "trivium_retrieval_wait_seconds_bucket" not in text


async def test_prometheus_parses_documented_retrieval_metrics() -> None:
    gateway = InProcessGateway()
    gateway.state.metrics.fleet = fleet
    async with gateway.client() as client:
        text = (await client.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    page = (ROOT / "infra/docs/operate.md").read_text()
    page_names = set(re.findall(r"`(\w+)`", page[page.index("### Metrics of searches") :]))
    samples = {f.name + "_total" * (f.type == "counter") for f in families.values()}
    ours = {name.removeprefix(PREFIX) for name in samples if name.startswith(PREFIX)}
    assert ours <= page_names, ours - page_names
    histogram = families["trivium_retrieval_wait_seconds"]
    assert histogram.type == "histogram"
    assert len([s for s in histogram.samples if s.name.endswith("_bucket")]) == len(SEARCH_MS) + 1


def test_metrics_aggregate_vector_stores() -> None:
    """Their ids belong to tenants, and /metrics needs no key."""
    stores = [replace(BOOKS, name=f"vs_{n}", missed_share=n / 10) for n in (1, 2)]
    text = render(fleet(replace(LOAD, collections=(BOOKS, *stores))))
    assert "vs_" not in text
    of = 'shard="1",worker="r"'
    for line in (
        f'documents{{collection="vector stores",{of}}} 10.0',
        f'missed_share{{collection="vector stores",{of}}} 0.2',
        f'documents{{collection="books",{of}}} 5.0',
    ):
        assert _sorted_labels(f"trivium_retrieval_{line}") in _lines(text)
