"""Runs a shadow's process: reads journals and their records from the log, and writes decisions.

`shadow.py` makes the decisions. The process reads without a consumer group and joins no fleet; its
producer writes one topic.
"""

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack, suppress

from infra.replay.named_records import NamedRecords
from infra.replay.shadow import Shadow, places_to_read
from infra.story.record_finder import CLOCKS_MS, LogFinder, Window
from schemas.codec import Codec
from schemas.errors import ConfigError, RecordError
from schemas.records import Decision
from schemas.settings import LogSettings
from streams.journal.journal import JournalEntry
from streams.log.clients import AssignedReader, LogProducer
from streams.log.clock import wall_ms
from streams.log.registry import make_codec
from streams.log.retry import run_with_reconnect

TOPIC = "decisions.shadow"
_READ_S, _LOOK_MS, _ENTRIES = 60.0, 500, 200


async def run_shadow(
    log: LogSettings,
    overrides: Mapping[str, str],
    *,
    shadow_id: str,
    stop: asyncio.Event,
    codec: Codec,
    snapshot_ms: int,
) -> None:
    """Decide beside the routers until `stop` is set.

    `snapshot_ms` is the time between the routers' snapshots. Raises ConfigError for settings that a
    shadow cannot use.
    """
    shadow = Shadow(shadow_id, overrides, wall_ms())

    async def life() -> None:
        shadow.begin()
        async with AsyncExitStack() as stack:
            producer = LogProducer(log, codec, durable=True, client_id=shadow_id)
            await stack.enter_async_context(producer)
            records = NamedRecords(log, codec, shadow_id)
            await records.start(stack)
            journal = AssignedReader(log, "journal", [0], client_id=shadow_id)
            await stack.enter_async_context(journal.reading("nowhere"))
            since_ms = wall_ms() - 2 * snapshot_ms
            await journal.seek(await journal.offsets_at(max(0, since_ms)))
            while not stop.is_set():
                batch = await journal.batch(max_records=_ENTRIES, timeout_ms=_LOOK_MS)
                entries = list(_entries(codec, (message.value for message in batch)))
                values = await records.read(places_to_read(entries), _READ_S)
                acks = [
                    await producer.send(
                        TOPIC, decision, key=decision.session_id, partition=partition
                    )
                    for entry in entries
                    for decision, partition in shadow.apply(entry, values)
                ]
                await asyncio.gather(*acks)
                shadow.mark_written()

    await run_with_reconnect(shadow_id, life, stop)


async def read_decisions(
    log: LogSettings, since_ms: int, until_ms: int, shadow_id: str = ""
) -> list[Decision]:
    """Return what a shadow decided in that time; without an id, the only shadow.

    Raises ConfigError where the shadow is unknown, or there are several and none is named.
    """
    finder = LogFinder(log, await asyncio.to_thread(make_codec, log))
    window = Window(max(0, since_ms - CLOCKS_MS), until_ms + CLOCKS_MS)
    decisions = await finder.find(TOPIC, range(log.session_partitions), "", window)
    names = sorted({decision.router_id for decision in decisions})
    if shadow_id and shadow_id not in names:
        expected = ", ".join(names) or "none"
        raise ConfigError(f"--shadow-id: expected any of {expected}, found {shadow_id}")
    if not shadow_id and len(names) > 1:
        raise ConfigError(f"--shadow-id: expected one of {', '.join(names)}; name it")
    return [decision for decision in decisions if shadow_id in ("", decision.router_id)]


def _entries(codec: Codec, values: Iterable[bytes | None]) -> Iterable[JournalEntry]:
    """Yield the readable entries of the journal, as replays do."""
    for value in values:
        with suppress(RecordError):
            if value:
                yield codec.decode(value)
