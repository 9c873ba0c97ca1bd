"""What a request costs, as the benchmark tells it."""

import pytest

from infra.bench.costs import main as costs
from schemas.codec import Codec
from schemas.log.clients import LogProducer
from schemas.records import Cancellation, CancelReason
from schemas.settings import LogSettings

FIGURES = {
    "idle": {"broker": {"cores": 0.1, "wakeups_per_s": 300.0}},
    "cells": {
        "1 stream": {
            "cpu_ms": {"broker": 3.0, "router": 2.0},
            "topics": {"usage": {"records": 1.0, "bytes": 255.0, "marks": 0.1}},
        }
    },
    "held_kib": {"gateway": 12.0},
}


def shown(committed: object) -> dict[str, list[list[str]]]:
    return {
        str(table.title): [list(row) for row in zip(*(c.cells for c in table.columns), strict=True)]
        for table in costs.tables(FIGURES, committed)  # type: ignore[arg-type]
    }


def test_figures_stand_beside_the_committed_ones() -> None:
    before = {**FIGURES, "idle": {"broker": {"cores": 0.2, "wakeups_per_s": 600.0}}}
    alone = shown(None)
    assert alone["CPU, ms per request"] == [["broker", "3"], ["router", "2"], ["all", "5"]]
    assert alone["Bytes per request"] == [["usage", "255"]]
    both = shown({"figures": before, "commit": "8ac655a1234"})
    assert both["Idle (before: 8ac655a)"][0] == ["broker", "0.1 (0.2)", "300 (600)"]
    assert both["KiB per held stream (before: 8ac655a)"] == [["gateway", "12 (12)"]]


@pytest.mark.kafka
async def test_what_was_written_meanwhile_is_counted(kafka: LogSettings) -> None:
    producer = LogProducer(kafka, Codec(), durable=True, client_id="writer")
    given_up = Cancellation(
        request_id="r", session_id="s", reason=CancelReason.CLIENT_GONE, at_ms=1_700_000_000_000
    )

    async def send() -> None:
        await (await producer.send("cancellations", given_up, key="s", partition=0))

    await producer.start()
    try:
        await send()
        before = await costs.ends(kafka)
        for _ in range(3):
            await send()
    finally:
        await producer.stop()
    found = await costs.counts(kafka, before, await costs.ends(kafka))
    counted = found.pop("cancellations")
    assert (counted["records"], counted["marks"]) == (3, 0)
    value = len(Codec().encode(given_up))
    assert 3 * (len("s") + value) < counted["bytes"] < 3 * (len("s") + value) + 1_000  # headers
    assert set(found) <= set(costs._INTERNAL)
