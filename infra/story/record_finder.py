"""Finds a request's records on the log.

A request id contains the time when its call arrived, so the `requests` topic is read from then on.
The request has its session and gateway, which determine the partitions of all other records.
Records are searched as bytes, and decoded only if they contain the id. For questions afterwards,
never for serving.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from infra.story.story import Story, build_stories
from schemas.codec import Codec
from schemas.errors import NotFound, RecordError
from schemas.records import Outcome, Request
from schemas.settings import LogSettings
from schemas.topics import DAY_MS, TOPICS, partition_of
from streams.calls.ids import arrival_of, from_public
from streams.log.clients import AssignedReader
from streams.log.clock import wall_ms
from streams.log.registry import make_codec

CLOCKS_MS = 10_000  # the largest difference between the clocks of processes
ACCEPT_MS = 60_000  # a request is on the log at most this long after its arrival
NAME_CHARS_MIN = 4
MATCHES_MAX = 64  # requests that are examined for an ambiguous name
_NAMED_MAX = 5
_OF_SESSIONS = ("cancellations", "decisions", "phases")
_OF_WORKERS = ("prefill", "decode")
_STORY_TOPICS = ("requests", "outcomes", *_OF_SESSIONS, *_OF_WORKERS, "tokens")

Progress = Callable[[str, int, int], None]  # topic, offsets read, offsets to read


@dataclass(frozen=True, slots=True)
class Window:
    """Wall-clock times between which records are examined."""

    since_ms: int
    until_ms: int

    def __str__(self) -> str:
        times = (self.since_ms / 1000, self.until_ms / 1000)
        since, until = (datetime.fromtimestamp(time_s, UTC) for time_s in times)
        return f"{since:%Y-%m-%d %H:%M:%S} to {until:%Y-%m-%d %H:%M:%S} UTC"


class Finder(Protocol):
    """The source of records; tests have their own."""

    async def find(
        self, topic: str, partitions: Sequence[int], needle: str, window: Window, limit: int = 0
    ) -> list[Any]:
        """Return decoded records that contain the needle, in log order; at most `limit`, if set."""


class LogFinder:
    """Finds records by reading the topics of the log."""

    def __init__(self, log: LogSettings, codec: Codec, progress: Progress | None = None) -> None:
        self._log = log
        self._codec = codec
        self._progress = progress

    async def find(
        self, topic: str, partitions: Sequence[int], needle: str, window: Window, limit: int = 0
    ) -> list[Any]:
        """Find records on the log as `Finder` specifies. Raises TopicError, BrokerUnavailable.

        Unreadable records are skipped: their reader has written them to the dead-letter topic.
        """
        reader = AssignedReader(self._log, topic, partitions, client_id="trivium-story")
        async with reader.reading("nowhere"):
            starts = await reader.offsets_at(max(0, window.since_ms))
            ends = await reader.offsets_at(window.until_ms)
            await reader.seek(starts)
            total = sum(ends[place] - starts[place] for place in ends)
            matches: list[Any] = []
            passed = 0
            async for batch in reader.until(ends):
                matches += self._matching(batch, needle.encode())
                passed += len(batch)
                if self._progress is not None:
                    self._progress(topic, min(passed, total), total)
                if limit and len(matches) >= limit:
                    return matches[:limit]
            return matches

    def _matching(self, batch: Sequence[Any], needle: bytes) -> list[Any]:
        matches = []
        for record in batch:
            if record.value is None or needle not in record.value:
                continue
            try:
                matches.append(self._codec.decode(record.value))
            except RecordError:
                continue
        return matches


def window_of(name: str, since_ms: int, now_ms: int) -> Window:
    """Return the times between which a request of this name can have arrived.

    They lie around its arrival, if the name tells that more closely than `since_ms`, the span to
    look back. A name that tells a future time is treated as any other name.
    """
    prompt_arrival = arrival_of("r" + name[1:]) if name[:1] == "q" else None
    if prompt_arrival is not None:  # an id made by a bridge, whose prompt may have waited for long
        return Window(
            max(min(prompt_arrival[0], now_ms) - CLOCKS_MS, now_ms - since_ms), now_ms + CLOCKS_MS
        )
    arrival = arrival_of(name)
    if (
        arrival is not None
        and arrival[1] - arrival[0] <= since_ms
        and arrival[0] <= now_ms + CLOCKS_MS
    ):
        return Window(arrival[0] - CLOCKS_MS, arrival[1] + ACCEPT_MS)
    return Window(now_ms - since_ms, now_ms + CLOCKS_MS)


async def find_request(
    finder: Finder, log: LogSettings, name: str, *, since_ms: int, now_ms: int
) -> Request:
    """Return the request with this id, this beginning of an id, or this id of an OpenAI answer.

    Raises NotFound with advice.
    """
    prefix = from_public(name.strip())
    if len(prefix) < NAME_CHARS_MIN:
        raise NotFound(f"{name}: expected at least {NAME_CHARS_MIN} characters of a request id")
    window = window_of(prefix, since_ms, now_ms)
    partitions = range(log.session_partitions)
    records = await finder.find("requests", partitions, prefix, window, MATCHES_MAX)
    by_id = {r.request_id: r for r in records if isinstance(r, Request)}
    if prefix in by_id:
        return by_id[prefix]
    ids = sorted(request_id for request_id in by_id if request_id.startswith(prefix))
    if len(ids) == 1:
        return by_id[ids[0]]
    if ids:
        suffix = f" and {len(ids) - _NAMED_MAX} more" if len(ids) > _NAMED_MAX else ""
        raise NotFound(
            f"{prefix}: {len(ids)} requests begin so: {', '.join(ids[:_NAMED_MAX])}{suffix}; "
            "name one (choices of one call end in -0, -1, ...)"
        )
    raise NotFound(_nowhere(log, prefix, window, now_ms))


def _nowhere(log: LogSettings, prefix: str, window: Window, now_ms: int) -> str:
    topic = f"{log.topic_prefix}requests"
    hours = TOPICS["requests"].retention_ms // 3_600_000
    advice = "try `--since 24h`"
    if (arrival := arrival_of(prefix)) is not None and arrival[1] <= window.until_ms:
        advice = "the id says that it arrived then"
        if now_ms - arrival[1] > TOPICS["requests"].retention_ms:
            advice += f", and requests are kept for {hours} h"
    return (
        f"{prefix}: no such request on {topic} at {log.bootstrap} from {window}; {advice}; check "
        "the id (x-trivium-request-id of the response), --bootstrap and log.topic_prefix; a call "
        "that was refused is not on the log"
    )


async def collect(finder: Finder, log: LogSettings, request: Request) -> Story:
    """Return all records about the request, up to its outcome or to now."""
    needle, arrived_ms = request.request_id, request.arrived_ms
    session = [partition_of(request.session_id, log.session_partitions)]
    whole = Window(arrived_ms - CLOCKS_MS, max(wall_ms(), arrived_ms) + CLOCKS_MS)
    outcomes = await finder.find("outcomes", session, needle, whole)
    ended_ms = [o.ended_ms for o in outcomes if isinstance(o, Outcome) and o.request_id == needle]
    until_ms = min(ended_ms[0] + CLOCKS_MS, whole.until_ms) if ended_ms else whole.until_ms
    window = Window(whole.since_ms, until_ms)
    places = [(topic, session) for topic in _OF_SESSIONS]
    places += [(topic, list(range(log.worker_partitions))) for topic in _OF_WORKERS]
    places.append(("tokens", [request.gateway_partition]))
    batches = await asyncio.gather(*(finder.find(t, p, needle, window) for t, p in places))
    records = [record for records in (outcomes, *batches) for record in records]
    return build_stories([request], records)[needle]


async def read_story(
    log: LogSettings,
    name: str,
    *,
    since_ms: int = DAY_MS,
    progress: Progress | None = None,
) -> Story:
    """Return one request's story; for `name` and errors see `find_request`."""
    finder = LogFinder(log, await asyncio.to_thread(make_codec, log), progress)
    request = await find_request(finder, log, name, since_ms=since_ms, now_ms=wall_ms())
    return await collect(finder, log, request)


async def read_stories(log: LogSettings) -> dict[str, Story]:
    """Return the story of every request on the log, by request id; reads the topics completely."""
    finder = LogFinder(log, await asyncio.to_thread(make_codec, log))
    window = Window(0, wall_ms() + CLOCKS_MS)
    requests, *batches = await asyncio.gather(
        *(
            finder.find(topic, range(log.partitions(TOPICS[topic].group)), "", window)
            for topic in _STORY_TOPICS
        )
    )
    return build_stories(requests, [record for records in batches for record in records])
