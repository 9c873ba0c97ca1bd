"""The retrieval benchmark's report: bars and tables from its figures."""

from infra.bench.retrieval.latency import IDLE, SATURATED
from infra.bench.retrieval.main import bars, tables
from infra.bench.retrieval.quality import WITH, WITHOUT

SPREAD = {"p50": 10.0, "p99": 20.0, "count": 9}
LOAD = {
    "ttft_ms": {"with": SPREAD, "without": SPREAD},
    "search_ms": {"prefill": SPREAD, "decode": SPREAD},
}
SLOW = {**LOAD, "ttft_ms": {"with": {**SPREAD, "p99": 40.0}, "without": SPREAD}}
SHARES = {
    "right": 0.9,
    "right_paraphrased": 0.8,
    "page_found": 1.0,
    "page_found_paraphrased": 1.0,
    "tokens_put_in": 40.0,
    "questions": 300,
}
FOUND = {
    "quality": {"30": {WITH: SHARES, WITHOUT: SHARES}, "300": {WITH: {**SHARES, "right": 0.7}}},
    "latency": {"1 chats/s": {IDLE: LOAD, SATURATED: SLOW}},
    "freshness": {
        "found_ms": SPREAD,
        "documents": 100,
        "documents_per_s": 9.0,
        "embedding_alone_per_s": 10.0,
    },
}


def test_bars_are_of_300_pages_a_full_queue_and_freshness() -> None:
    said = {bar.name: (bar.value, bar.met) for bar in bars(FOUND)}
    assert said == {
        "right answers, 300 pages": (0.7, False),
        "TTFT p99 with a search, decode queue full: 1 chats/s": (2.0, False),
        "document found under load, p99": (20.0, True),
        "ingest beside the embedding model alone": (0.9, True),
    }


def test_a_part_that_did_not_run_has_no_bar_and_no_table() -> None:
    assert bars({}) == [] and tables({}) == []
    assert len(tables(FOUND)) == 3
