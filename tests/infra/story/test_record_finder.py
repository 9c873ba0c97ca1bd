"""A request's records: found by its id, wherever they lie on the log."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from infra.story.record_finder import ACCEPT_MS, CLOCKS_MS, Window, collect, find_request, window_of
from schemas.errors import NotFound
from schemas.records import (
    OutcomeKind,
)
from schemas.settings import LogSettings
from schemas.topics import DAY_MS, partition_of
from streams.calls.ids import arrival_of, derive_ids, new_request_id
from tests.infra.story.story_records import DECODE, ENDED, FRAMES, PLACED, PREFILL, RECEIVED, frame
from tests.streams.builders import T0, request

LOG = LogSettings(session_partitions=4, worker_partitions=2)


HOUR_MS = 3_600_000


NOW_MS = 1_790_000_000_000


class FakeLog:
    """Hold records by topic and partition, with the time of each write."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, int], list[tuple[int, Any]]] = {}
        self.queries: list[tuple[str, tuple[int, ...], Window]] = []

    def add(self, topic: str, partition: int, at_ms: int, record: Any) -> None:
        self.records.setdefault((topic, partition), []).append((at_ms, record))

    async def find(
        self, topic: str, partitions: Sequence[int], needle: str, window: Window, limit: int = 0
    ) -> list[Any]:
        self.queries.append((topic, tuple(partitions), window))
        return [
            record
            for partition in partitions
            for at_ms, record in self.records.get((topic, partition), [])
            if window.since_ms <= at_ms < window.until_ms and needle in str(record)
        ][: limit or None]


def stored(*ids: str, arrived_ms: int = NOW_MS - 1_000) -> FakeLog:
    """Return a log with these requests."""
    log = FakeLog()
    for request_id in ids:
        record = request(request_id, arrived_ms=arrived_ms)
        log.add("requests", partition_of(record.session_id, 4), arrived_ms + 5, record)
    return log


async def find(log: FakeLog, name: str, *, since_ms: int = HOUR_MS) -> str:
    hit = await find_request(log, LOG, name, since_ms=since_ms, now_ms=NOW_MS)
    return hit.request_id


def test_request_id_gives_arrival_time_and_search_window() -> None:
    request_id = new_request_id(NOW_MS)
    assert arrival_of(request_id) == arrival_of(request_id[:11]) == (NOW_MS, NOW_MS)
    first, last = arrival_of(request_id[:7]) or (0, 0)
    assert first <= NOW_MS <= last < first + 32**4
    for name in ("r", "", "x" + request_id[1:], "rUPPER", "r1-il"):
        assert arrival_of(name) is None
    window = Window(NOW_MS - CLOCKS_MS, NOW_MS + ACCEPT_MS)
    assert window_of(request_id, HOUR_MS, NOW_MS + 5 * HOUR_MS) == window
    for name in ("mine", "rzzzzzzzzzz"):  # the second tells of the year 10 889
        assert window_of(name, HOUR_MS, NOW_MS) == Window(NOW_MS - HOUR_MS, NOW_MS + CLOCKS_MS)


async def test_finder_locates_old_request_by_time_in_its_id() -> None:
    request_id = new_request_id(NOW_MS - 9 * HOUR_MS)
    log = stored(request_id, arrived_ms=NOW_MS - 9 * HOUR_MS)
    for name in (request_id, "chatcmpl-" + request_id, "cmpl-" + request_id, request_id[:14]):
        assert await find(log, name) == request_id
    topic, partitions, window = log.queries[0]
    assert (topic, partitions) == ("requests", (0, 1, 2, 3))
    assert window.until_ms - window.since_ms == CLOCKS_MS + ACCEPT_MS


async def test_finder_accepts_unique_id_prefix() -> None:
    log = stored("call-a", "call-a-b", "call-b0", "call-b1")
    assert await find(log, "call-a") == "call-a"  # the whole id of one, a beginning of another
    assert await find(log, "call-a-") == "call-a-b"
    with pytest.raises(NotFound, match=r"2 requests begin so: call-b0, call-b1; name one"):
        await find(log, "call-b")
    with pytest.raises(NotFound, match=r"4 requests begin so: .* name one"):
        await find(log, "call")
    with pytest.raises(NotFound, match="expected at least 4 characters"):
        await find(log, "cal")


async def test_not_found_error_names_window_and_remedy() -> None:
    log = stored("call-a")
    with pytest.raises(NotFound, match=r"requests at .* from 2026-.* UTC; try `--since 24h`"):
        await find(log, "call-z")
    with pytest.raises(NotFound, match="call-a: no such request"):
        await find(log, "call-a", since_ms=500)
    old = new_request_id(NOW_MS - 30 * HOUR_MS)
    with pytest.raises(NotFound, match="the id says .* requests are kept for 24 h.*--bootstrap"):
        await find(log, old)


async def test_collect_reads_only_records_of_request() -> None:
    log, target = FakeLog(), request("r1", tokens=100, gateway_partition=3)
    session = partition_of(target.session_id, 4)
    log.add("outcomes", session, T0 + 100, ENDED)
    log.add("outcomes", session, T0 + 200, replace(ENDED, kind=OutcomeKind.FAILED))
    log.add("decisions", session, T0 + 4, PLACED)
    log.add("decisions", session, T0 + 4, replace(PLACED, request_id="r1-0"))
    log.add("phases", session, T0 + 36, RECEIVED)
    log.add("prefill", 1, T0 + 5, PREFILL)
    log.add("decode", 0, T0 + 31, DECODE)
    for token_frame in FRAMES:
        log.add("tokens", 3, token_frame.at_ms, token_frame)
    log.add("tokens", 2, T0 + 27, frame("elsewhere", 27, 0, 9))
    story = await collect(log, LOG, target)
    assert story.outcome == ENDED
    assert (story.decisions, story.phases, story.work) == ([PLACED], [RECEIVED], [PREFILL, DECODE])
    assert story.token_ids == [0, 1, 2, 3, 4]
    windows = {topic: (partitions, window) for topic, partitions, window in log.queries}
    assert windows["tokens"] == ((3,), Window(T0 - CLOCKS_MS, T0 + 100 + CLOCKS_MS))
    assert windows["decisions"][0] == (session,)
    assert windows["prefill"][0] == (0, 1)
    assert windows["outcomes"][1].until_ms > T0 + 10 * HOUR_MS  # to the end


def test_prompt_request_window_starts_at_prompt_time() -> None:
    """The request may have waited for hours before it was submitted."""
    name, _ = derive_ids(NOW_MS - 3_600_000, b"0123456789")
    window = window_of(name, DAY_MS, NOW_MS)
    assert window.since_ms == NOW_MS - 3_600_000 - CLOCKS_MS
    assert window.until_ms == NOW_MS + CLOCKS_MS
    old, _ = derive_ids(0, b"0123456789")
    assert window_of(old, DAY_MS, NOW_MS).since_ms == NOW_MS - DAY_MS
