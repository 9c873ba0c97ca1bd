"""ARCHITECTURE.md names every file that runs on a request's way through a router."""

import asyncio
from typing import Any

from schemas.records import Role, Work
from streams.log.clock import wall_ms
from tests.request_path import named_files, recorded_files
from tests.streams import builders
from tests.streams.agents.fakes import CODEC, FakeEvent, router_with_partition
from tests.waits import until

ROUTER_FILES_MAX = 18


async def test_page_names_every_router_file() -> None:
    partitions, producer = await router_with_partition()
    process, now_ms = partitions.process, wall_ms()

    def apply_record(record: Any) -> None:
        process.membership.view.apply(record, 0, now_ms, now_ms)
        process._apply_fleet_record(record, 0, now_ms)

    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
        apply_record(builders.registration(name, role, started_ms=now_ms))
        apply_record(builders.beat(name, 1, {role: 4}, router_id="router-a", at_ms=now_ms))
    request = builders.request("r1", arrived_ms=now_ms, deadline_ms=now_ms + 600_000)
    event = FakeEvent(CODEC.encode(request))
    outbox = asyncio.create_task(process.outbox.run())

    def works() -> list[Work]:
        return [record for _, record, *_ in producer.sends if isinstance(record, Work)]

    with recorded_files("streams", until=works) as files:
        await partitions.process.take("requests", event)
        await until(lambda: works() != [])
    outbox.cancel()
    page_files = named_files("streams/agents", "streams/core", "streams/journal", "streams/log")
    assert set(files) == set(page_files) and len(page_files) <= ROUTER_FILES_MAX
    in_core = [name for name in files if name.startswith("streams/core/")]
    assert [name for name in page_files if name in in_core] == in_core
