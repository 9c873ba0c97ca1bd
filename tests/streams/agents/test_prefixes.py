"""What a router process reads of prefix caches."""

from dataclasses import replace
from typing import Any

import pytest

from schemas import prefix
from schemas.records import KvEvents
from streams.agents.prefixes import Prefixes
from tests.streams import builders
from tests.streams.agents.fakes import LOG, FakeEvent, router_with_partition
from tests.streams.builders import T0
from tests.waits import run

KV_EVENTS = KvEvents(worker_id="d0", epoch=1, seq=0, at_ms=T0, block_size=16, snapshot=True)


def test_kv_events_reach_core_and_journal() -> None:
    async def main() -> None:
        partitions, _ = await router_with_partition()
        process = partitions.process
        process.journal.cut(1)
        record = replace(KV_EVENTS, stored=prefix.pack([1, 2, 3]))
        await process.prefixes.take(FakeEvent(process.codec.encode(record), offset=7))
        assert len(process.router.placer.prefixes) == 3
        (batch,) = process.journal.cut(1)
        assert (batch.topics, batch.offsets) == (("prefixes",), (7,))

    run(main())


@pytest.mark.parametrize("changes", [{"block_size": 0}, {"stored": b"odd"}, {"removed": b"odd"}])
def test_prefixes_dead_letter_malformed_records(changes: dict[str, Any]) -> None:
    async def main() -> None:
        partitions, producer = await router_with_partition()
        process = partitions.process
        reader = Prefixes(
            LOG,
            process.codec,
            producer,  # type: ignore[arg-type]  # a fake
            client_id="test",
            on_record=lambda record, offset: pytest.fail("it is malformed"),
        )
        tombstone = FakeEvent(None)
        await reader.take(tombstone)
        malformed = process.codec.encode(replace(KV_EVENTS, **changes))
        for value in (malformed, process.codec.encode(builders.request("r1")), b"garbage"):
            await reader.take(FakeEvent(value))
        assert [topic for topic, *_ in producer.sends] == ["test.requests.dlq"] * 3

    run(main())
