"""The files that ARCHITECTURE.md names for a request's way through a router are those that run."""

import asyncio
from typing import Any

from schemas.records import Role, Work
from streams.log.clock import wall_ms
from tests.request_path import named_files, recorded_files
from tests.streams import builders
from tests.streams.agents.fakes import CODEC, FakeEvent, router_with_partition
from tests.waits import until

# They run too, and answer a question of a file that the page names: what the router knows of the
# request, the fleet and its caches, and what a placement costs; or they note what was done.
BESIDE = {
    "streams/agents/marks.py", "streams/journal/inputs.py", "streams/journal/journal.py",
    *(
        f"streams/core/{name}.py"
        for name in (
            "tables", "fleet/members", "fleet/workers", "handlers/decisions", "handlers/endings",
            "placement/answer", "placement/case", "placement/estimates", "placement/orchestration",
            "placement/policies", "placement/prefixes", "placement/regression",
            "placement/selection", "placement/wishes", "requests/demand", "requests/ended_ids",
            "requests/live", "requests/sessions",
        )
    ),
}  # fmt: skip
OUTBOX = "streams/agents/outbox.py"  # counts the record at its arrival, and sends at the end


async def test_page_names_router_files_in_call_order() -> None:
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
        await partitions.take("requests", event)
        await until(lambda: works() != [])
    outbox.cancel()
    *page_files, last = named_files("streams/agents", "streams/core")
    assert last == OUTBOX and OUTBOX in files
    assert page_files == [name for name in files if name in page_files]
    assert files.keys() - {*page_files, OUTBOX} <= BESIDE
