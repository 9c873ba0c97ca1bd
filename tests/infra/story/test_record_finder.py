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
from schemas.topic import DAY_MS
from schemas.topics import partition_of
from streams.gateway.ids import arrival_of, derive_ids, new_request_id
from tests.infra.story.told_requests import DECODE, ENDED, FRAMES, PLACED, PREFILL, RECEIVED, frame
from tests.streams.builders import T0, request

LOG = LogSettings(session_partitions=4, worker_partitions=2)


HOUR_MS = 3_600_000


NOW_MS = 1_790_000_000_000


class FakeLog:
    """Records by topic and partition, with the time at which each was written."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, int], list[tuple[int, Any]]] = {}
        self.asked: list[tuple[str, tuple[int, ...], Window]] = []

    def add(self, topic: str, partition: int, at_ms: int, record: Any) -> None:
        self.records.setdefault((topic, partition), []).append((at_ms, record))

    async def find(
        self, topic: str, partitions: Sequence[int], needle: str, window: Window, limit: int = 0
    ) -> list[Any]:
        self.asked.append((topic, tuple(partitions), window))
        return [
            record
            for partition in partitions
            for at_ms, record in self.records.get((topic, partition), [])
            if window.since_ms <= at_ms < window.until_ms and needle in str(record)
        ][: limit or None]


def stored(*ids: str, arrived_ms: int = NOW_MS - 1_000) -> FakeLog:
    """A log with these requests."""
    log = FakeLog()
    for request_id in ids:
        one = request(request_id, arrived_ms=arrived_ms)
        log.add("requests", partition_of(one.session_id, 4), arrived_ms + 5, one)
    return log


async def find(log: FakeLog, name: str, *, since_ms: int = HOUR_MS) -> str:
    found = await find_request(log, LOG, name, since_ms=since_ms, now_ms=NOW_MS)
    return found.request_id


def test_an_id_tells_when_its_call_arrived() -> None:
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


async def test_an_old_request_is_found_where_its_id_says() -> None:
    request_id = new_request_id(NOW_MS - 9 * HOUR_MS)
    log = stored(request_id, arrived_ms=NOW_MS - 9 * HOUR_MS)
    for name in (request_id, "chatcmpl-" + request_id, "cmpl-" + request_id, request_id[:14]):
        assert await find(log, name) == request_id
    topic, partitions, window = log.asked[0]
    assert (topic, partitions) == ("requests", (0, 1, 2, 3))
    assert window.until_ms - window.since_ms == CLOCKS_MS + ACCEPT_MS


async def test_a_beginning_is_enough_where_only_one_request_has_it() -> None:
    log = stored("call-a", "call-a-b", "call-b0", "call-b1")
    assert await find(log, "call-a") == "call-a"  # the whole id of one, a beginning of another
    assert await find(log, "call-a-") == "call-a-b"
    with pytest.raises(NotFound, match=r"2 requests begin so: call-b0, call-b1; name one"):
        await find(log, "call-b")
    with pytest.raises(NotFound, match=r"4 requests begin so: .* name one"):
        await find(log, "call")
    with pytest.raises(NotFound, match="expected at least 4 characters"):
        await find(log, "cal")


async def test_what_is_not_there_says_where_was_looked_and_what_to_try() -> None:
    log = stored("call-a")
    with pytest.raises(NotFound, match=r"requests at .* from 2026-.* UTC; try `--since 24h`"):
        await find(log, "call-z")
    with pytest.raises(NotFound, match="call-a: no such request"):
        await find(log, "call-a", since_ms=500)
    old = new_request_id(NOW_MS - 30 * HOUR_MS)
    with pytest.raises(NotFound, match="the id says .* requests are kept for 24 h.*--bootstrap"):
        await find(log, old)


async def test_only_what_belongs_to_the_request_is_read() -> None:
    log, asked = FakeLog(), request("r1", tokens=100, gateway_partition=3)
    session = partition_of(asked.session_id, 4)
    log.add("outcomes", session, T0 + 100, ENDED)
    log.add("outcomes", session, T0 + 200, replace(ENDED, kind=OutcomeKind.FAILED))
    log.add("decisions", session, T0 + 4, PLACED)
    log.add("decisions", session, T0 + 4, replace(PLACED, request_id="r1-0"))
    log.add("phases", session, T0 + 36, RECEIVED)
    log.add("prefill", 1, T0 + 5, PREFILL)
    log.add("decode", 0, T0 + 31, DECODE)
    for one in FRAMES:
        log.add("tokens", 3, one.at_ms, one)
    log.add("tokens", 2, T0 + 27, frame("elsewhere", 27, 0, 9))
    story = await collect(log, LOG, asked)
    assert story.outcome == ENDED
    assert (story.decisions, story.phases, story.work) == ([PLACED], [RECEIVED], [PREFILL, DECODE])
    assert story.token_ids == [0, 1, 2, 3, 4]
    windows = {topic: (partitions, window) for topic, partitions, window in log.asked}
    assert windows["tokens"] == ((3,), Window(T0 - CLOCKS_MS, T0 + 100 + CLOCKS_MS))
    assert windows["decisions"][0] == (session,)
    assert windows["prefill"][0] == (0, 1)
    assert windows["outcomes"][1].until_ms > T0 + 10 * HOUR_MS  # to the end


def test_a_prompts_request_is_looked_for_from_its_prompt_on() -> None:
    """It may have waited for hours until it was asked."""
    name, _ = derive_ids(NOW_MS - 3_600_000, b"0123456789")
    window = window_of(name, DAY_MS, NOW_MS)
    assert window.since_ms == NOW_MS - 3_600_000 - CLOCKS_MS
    assert window.until_ms == NOW_MS + CLOCKS_MS
    old, _ = derive_ids(0, b"0123456789")
    assert window_of(old, DAY_MS, NOW_MS).since_ms == NOW_MS - DAY_MS
