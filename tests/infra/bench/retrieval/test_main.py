"""The retrieval benchmark's report: bars and tables from its figures."""

import pytest

from infra.bench.retrieval.answers import BOTH, NONE, PROMPT, SEARCH, USUAL, WITH, WITHOUT
from infra.bench.retrieval.loads import IDLE, SATURATED
from infra.bench.retrieval.losses import NO_SHARD, ONE_REPLICA, WHOLE
from infra.bench.retrieval.main import bars, tables

SPREAD = {"p50": 10.0, "p99": 20.0, "count": 9}
LOAD = {
    "ttft_ms": {"with": SPREAD, "without": SPREAD},
    "search_ms": {"prefill": SPREAD, "decode": SPREAD},
    "late": 0,
}
SLOW = {**LOAD, "ttft_ms": {"with": {**SPREAD, "p99": 40.0}, "without": SPREAD}}
ROW = {"searches": 9, "missed": {"prefill": 1, "decode": 2}, "missed_share": 0.3, "moves": 4,
       "signals": ["link_bytes_per_s"]}  # fmt: skip
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
    "probes": {
        NONE: {"tokens_per_s": 100.0, "stalled_share": 0.0, "probes": 0.0, "put_in": 0.0},
        USUAL: {"tokens_per_s": 95.0, "stalled_share": 0.06, "probes": 8.0, "put_in": 2.0},
    },
    "early": {
        "ms": {PROMPT: 100.0, SEARCH: 20.0, BOTH: 110.0},
        "prompt_tokens": 1_200.0,
        "prompts": 3,
    },
    "losses": {
        phase: {"answers": 9, "lost": 0, "cited": 8, "say_so": phase == NO_SHARD, "silent": 0}
        for phase in (WHOLE, ONE_REPLICA, NO_SHARD)
    },
}


def test_bars_cover_300_pages_full_queue_and_freshness() -> None:
    bar_values = {bar.name: (bar.value, bar.met) for bar in bars(FOUND)}
    assert bar_values == {
        "right answers, 300 pages": (0.7, False),
        "tokens/s with probes every 32 beside none": (0.95, True),
        "decode time stalled by probes": (0.06, False),
        "TTFT of a long prompt with a search": (pytest.approx(1.1), False),
        "TTFT p99 with a search, decode queue full: 1 chats/s": (2.0, False),
        "document found under load, p99": (20.0, True),
        "ingest beside the embedding model alone": (0.9, True),
        "answers lost, replica and shard killed": (0, True),
        "answers that lack a page and do not say so": (0, True),
        "answers that say a shard was missing": (1, True),
    }


def test_report_omits_parts_that_did_not_run() -> None:
    assert bars({}) == [] and tables({}) == []
    assert len(tables(FOUND)) == 6
