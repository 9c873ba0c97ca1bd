"""What a router process reads besides its partitions: prefix caches, and the table of a policy."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schemas import prefix
from schemas.codec import Codec
from schemas.errors import ConfigError
from schemas.records import KvEvents
from streams.agents import router
from streams.agents.policy_table import load_table
from streams.agents.prefixes import Prefixes
from streams.config import RouterSettings
from streams.core.events import PartitionTaken
from streams.core.placement.ppd_table import AXES, Cell, PpdTable
from tests.streams import builders
from tests.streams.agents.fakes import LOG, FakeEvent, process_with_partition
from tests.streams.builders import T0
from tests.waiting import run

KV_EVENTS = KvEvents(worker_id="d0", epoch=1, seq=0, at_ms=T0, block_size=16, snapshot=True)


def test_prefix_caches_reach_the_core_and_the_journal() -> None:
    async def main() -> None:
        process, _ = await process_with_partition()
        process.journal.cut(1)
        record = replace(KV_EVENTS, stored=prefix.pack([1, 2, 3]))
        await process.prefixes.take(FakeEvent(process.codec.encode(record), offset=7))
        assert len(process.router.placer.prefixes) == 3
        (batch,) = process.journal.cut(1)
        assert batch.record is not None
        assert (batch.record.topics, batch.record.offsets) == (("prefixes",), (7,))

    run(main())


@pytest.mark.parametrize("changes", [{"block_size": 0}, {"stored": b"odd"}, {"removed": b"odd"}])
def test_what_is_no_record_of_a_prefix_cache_is_buried(changes: dict[str, Any]) -> None:
    async def main() -> None:
        process, producer = await process_with_partition()
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
        assert [topic for topic, *_ in producer.sent] == ["test.requests.dlq"] * 3

    run(main())


def test_the_table_of_a_policy_is_read_from_its_file(tmp_path: Path) -> None:
    cell = Cell(bin=(0, 0, 0, 0), gain_ttft=0.5, loss_tpot=0.1, samples=9)
    table = PpdTable(dict.fromkeys(AXES, (1.0,)), [cell])
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table.to_dict()))
    found = load_table(RouterSettings(policy="table", table=str(path)))
    assert found is not None and found.to_dict() == table.to_dict()
    assert load_table(RouterSettings(policy="static", table=str(path))) is not None, "for wishes"
    assert load_table(RouterSettings()) is None
    for text, message in (("{", r"expected a JSON file .*table\.json"), ("{}", r".*table\.json: ")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=rf"router\.table: {message}"):
            load_table(RouterSettings(policy="table", table=str(path)))


def test_a_rebuild_that_is_given_up_has_closed_what_it_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its connections would outlive the router, or be read from beside the next rebuild's."""
    reading, closed = asyncio.Event(), asyncio.Event()

    async def past(*_: object, **__: object) -> AsyncIterator[Any]:
        try:
            reading.set()
            yield await asyncio.Event().wait()
        finally:
            for _turn in range(9):
                await asyncio.sleep(0)
            closed.set()

    async def main() -> None:
        process, _ = await process_with_partition()
        sending = asyncio.create_task(process.outbox.run())
        process.assigned({0, 1})
        await reading.wait()
        await process.revoked()
        sending.cancel()
        assert closed.is_set() and not process.router.owned

    monkeypatch.setattr(router, "past_records", past)
    run(main())


def test_a_rebuild_counts_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the watchdog would take a long one for a stuck consumer (issue 10, 5)."""

    async def past(*_: object, **__: object) -> AsyncIterator[Any]:
        for offset in range(3):
            value = codec.encode(builders.request(f"r{offset}"))
            yield "requests", FakeEvent(value, offset)
            counts.append(made[0].records_read)
        yield "requests", FakeEvent(b"garbage", 3)
        yield "sessions", FakeEvent(None)

    async def main() -> None:
        process, _ = await process_with_partition()
        made.append(process)
        process.apply(PartitionTaken(1), "taken", 1, 0)
        await process._rebuild([1])
        assert process.records_read == 5

    codec, counts, made = Codec(), list[int](), list[Any]()
    monkeypatch.setattr(router, "past_records", past)
    run(main())
    assert counts == [1, 2, 3]
