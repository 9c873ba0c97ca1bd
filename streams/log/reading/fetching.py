"""Makes fetches wait long at a broker without new records, so that idle readers send few requests.

Fetched data become readable (`batches.py`); heartbeats report failures (`faults.py`). A broker
answers a fetch as soon as there is a record, but it answers the requests of a connection in order.
So fetches have a connection of their own: no other request waits for one. When the partitions
change, an obsolete fetch is dropped with its connection. A fetch waits long only if nothing else
can need it meanwhile: there is one broker, so no partition moves to it from another, and the fetch
asks for every partition and for the same offsets as the last one.

aiokafka sends at most one fetch at a time to a broker, and has no setting for any of this.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from functools import partial
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka.consumer.fetcher import FetchResult
from aiokafka.errors import CorruptRecordException, UnsupportedCodecError, for_code
from aiokafka.protocol.fetch import FetchRequest

from streams.log.reading.batches import UNPACKED_BYTES_MAX, UnreadableRange, needs_mending, readable
from streams.log.reading.faults import FAULTS

log = logging.getLogger("trivium.log")
LONGEST_MS = 2_000
LOOK_MS = 1_000  # interval in which aiokafka checks what to fetch; changes wake it
_FETCHES = "fetches"  # a connection group besides aiokafka's own
_CLOSELY = 32  # fetches that are checked after an unreadable one
_INLINE_BYTES = 4 << 10  # larger data are unpacked in a thread
# Offsets out of range and changed leaders: aiokafka handles these.
_PASSING = frozenset((1, 5, 6, 9, 74, 75, 78))
_UNREADABLE = (CorruptRecordException, UnsupportedCodecError, UnicodeDecodeError)
_Question = frozenset[tuple[str, int, int]]
_Place = tuple[str, int]  # full topic, partition
_turns = itertools.count()


class FetchTimer:
    """Chooses how long each fetch of a consumer waits, by its broker."""

    def __init__(self, shortest_ms: int, longest_ms: int) -> None:
        self._shortest_ms, self._longest_ms = shortest_ms, max(shortest_ms, longest_ms)
        self._last_questions: dict[Hashable, tuple[_Question, int]] = {}

    def wait_ms(self, node: Hashable, question: _Question, count: int) -> int:
        """Return how long to wait in a fetch of these partitions and offsets; `count` is the number
        of all partitions that the consumer reads from that broker."""
        before, waited_ms = self._last_questions.get(node, (None, 0))
        idle = question == before and len(question) == count
        wait_ms = min(2 * waited_ms, self._longest_ms) if idle else self._shortest_ms
        self._last_questions[node] = question, wait_ms
        return wait_ms


class CloseScan:
    """Decides which fetches are checked closely: the next ones after an unreadable one."""

    def __init__(self) -> None:
        self._close_fetches = 0

    def next_is_close(self) -> bool:
        """Count one fetch; return whether to check it closely."""
        self._close_fetches = max(0, self._close_fetches - 1)
        return self._close_fetches > 0

    async def retry_read(self, read: Callable[[], Awaitable[Any]]) -> Any:
        """Return the result of `read`; on unreadable data, retry after another fetch."""
        for tries_left in reversed(range(_CLOSELY)):
            try:
                return await read()
            except _UNREADABLE:
                if not tries_left:
                    raise
                self._close_fetches = _CLOSELY
        raise AssertionError


def prepare_fetches(consumer: AIOKafkaConsumer, shortest_ms: int, longest_ms: int) -> None:
    """Change how a consumer fetches, before it is started; waits are between the two times."""
    client, fetches = consumer._client, FetchTimer(shortest_ms, longest_ms)  # noqa: SLF001  # above
    send, start, looking = client.send, consumer.start, CloseScan()

    async def send_apart(node_id: Any, request: Any, **options: Any) -> Any:
        if not isinstance(request, FetchRequest):
            return await send(node_id, request, **options)
        connection = client._conns.get((node_id, _FETCHES))  # noqa: SLF001
        if connection is not None and connection._requests:  # noqa: SLF001  # an obsolete fetch
            connection.close()
        leader = client.cluster.leader_for_partition
        count = sum(leader(partition) == node_id for partition in consumer.assignment())
        is_alone = len(client.cluster.brokers()) == 1
        request._max_wait_ms = (  # noqa: SLF001
            fetches.wait_ms(node_id, _question(request), count) if is_alone else shortest_ms
        )
        response = await send(node_id, request, group=_FETCHES)
        offsets = {(topic, partition): at for topic, partition, at in _question(request)}
        await _make_readable(response, offsets, looking.next_is_close())
        return response

    async def start_reading() -> None:
        await start()
        _read_all_or_nothing(consumer._fetcher, looking)  # noqa: SLF001

    client.send, consumer.start = send_apart, start_reading


def _read_all_or_nothing(fetcher: Any, looking: CloseScan) -> None:
    """Make a fetcher return the records of all partitions, or advance none of them.

    aiokafka advances each partition while it collects; if a later one is unreadable, it drops the
    records of the others. This resets their positions, so that they are fetched again.
    """
    take, subscriptions = fetcher.fetched_records, fetcher._subscriptions  # noqa: SLF001

    async def take_or_stay(partitions: Any, max_records: int | None) -> Any:
        positions = _positions(fetcher)
        try:
            return await take(partitions, 0, max_records)  # does not wait, so no seek intervenes
        except _UNREADABLE:
            for state, position in positions.items():
                state.consumed_to(position)
            raise

    async def fetched_records(
        partitions: Any,
        timeout: float = 0,  # noqa: ASYNC109  # as aiokafka names it
        max_records: int | None = None,
    ) -> Any:
        end_s = time.monotonic() + timeout
        while True:
            while subscriptions.reassignment_in_progress:
                await subscriptions.wait_for_assignment()
            records = await looking.retry_read(partial(take_or_stay, partitions, max_records))
            left_s = end_s - time.monotonic()
            if records or left_s <= 0:
                return records
            waiter = fetcher._create_fetch_waiter()  # noqa: SLF001
            ready_waiters, _ = await asyncio.wait([waiter], timeout=left_s)
            if not ready_waiters or fetcher._closed:  # noqa: SLF001
                waiter.cancel()
                return {}
            waiter.result()  # raises if a topic may not be read

    fetcher.fetched_records = fetched_records


def _positions(fetcher: Any) -> dict[Any, int]:
    """Return the positions of partitions with fetched data, by aiokafka's state of each."""
    states = (
        result._assignment.state_value(place)  # noqa: SLF001
        for place, result in fetcher._records.items()  # noqa: SLF001
        if isinstance(result, FetchResult)
    )
    return {state: state.position for state in states if state.has_valid_position}


async def _make_readable(response: Any, offsets: Mapping[_Place, int], closely: bool) -> None:
    brought: dict[_Place, bytes] = {}
    for topic, partitions in response.topics:
        for partition, code, *_, data in partitions:
            _note(topic, partition, code)
            if data and (closely or needs_mending(data)):
                brought[topic, partition] = data
    if not brought:
        return
    if sum(map(len, brought.values())) <= _INLINE_BYTES:
        mended = _mended(brought, offsets, closely)
    else:
        mended = await asyncio.to_thread(_mended, brought, offsets, closely)
    for (topic, partition), (_, passed_over) in mended.items():
        for gap in passed_over:
            log.warning("%s[%d]: %s", topic, partition, gap)
            FAULTS.note_unreadable(topic, partition, gap.last, gap.why)
    response.topics = [
        (
            topic,
            [
                (partition, *rest, mended[topic, partition][0])
                if (topic, partition) in mended
                else (partition, *rest, data)
                for partition, *rest, data in partitions
            ],
        )
        for topic, partitions in response.topics
    ]


def _note(topic: str, partition: int, code: int) -> None:
    if code and code not in _PASSING:
        FAULTS.note_failing(f"{topic}[{partition}]", f"cannot be read: {for_code(code).__name__}")
    elif not code and FAULTS.has_failing:
        FAULTS.note_working(f"{topic}[{partition}]")


def _mended(
    brought: Mapping[_Place, bytes], offsets: Mapping[_Place, int], closely: bool
) -> dict[_Place, tuple[bytes, list[UnreadableRange]]]:
    """Return each partition's data in readable form.

    The partitions take turns at being first, because later ones may exceed the budget and then wait
    for the next fetch.
    """
    places, budget_bytes, mended = list(brought), UNPACKED_BYTES_MAX, {}
    first = next(_turns) % len(places)
    for place in (*places[first:], *places[:first]):
        share = readable(brought[place], offsets[place], closely=closely, budget_bytes=budget_bytes)
        mended[place] = share.data, share.passed_over
        budget_bytes -= share.unpacked_bytes
    return mended


def _question(request: FetchRequest) -> _Question:
    return frozenset(
        (topic, partition, offset)
        for topic, partitions in request.topics
        for partition, offset, _ in partitions
    )
