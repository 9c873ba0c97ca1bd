"""Routers on a real broker tell what requests have used that ended under the one before them."""

import pytest

from infra.story.usage import Check, read_usage
from schemas.codec import Codec
from schemas.records import Role, Usage, Work
from schemas.settings import LogSettings
from schemas.topics import partition_of
from streams.agents import usage as usage_module
from streams.agents.usage import UsageWriter
from streams.core.effects import RecordUsage
from streams.core.handlers.endings import usage_of
from streams.core.requests.live import new_live_request
from streams.log.clock import wall_ms
from tests.streams import builders
from tests.streams.agents.stage import Stage, applied, fresh, of, router, stage, worker
from tests.streams.core.router_setups import replicas
from tests.waits import run, until

pytestmark = pytest.mark.kafka


async def ended_before(on: Stage, *names: str) -> None:
    """Requests whose router has died right after it had read their outcomes."""
    harness = replicas(window=len(names))
    for name in names:
        harness.request(name)
    for work, decision in zip(harness.works, harness.decisions, strict=True):
        request = fresh(work.request_id)
        await on.send("requests", request, request.session_id)
        await on.send("decisions", decision, request.session_id)
        outcome = builders.outcome(work, wall_ms(), worker_ms=40.0)
        await on.send("outcomes", outcome, request.session_id)


async def serve(on: Stage, name: str) -> None:
    """A request from its arrival to its end."""
    request = fresh(name)
    await on.send("requests", request, request.session_id)
    (work,) = await on.until("decode", of(name, Work))
    await on.send("outcomes", builders.outcome(work, wall_ms()), request.session_id)


async def committed_usage(log: LogSettings, count: int) -> dict[str, Usage]:
    """All that is committed, once there is so much of it."""
    usages: dict[str, Usage] = {}

    async def is_there() -> bool:
        check = Check()
        async for partition, usage in read_usage(log):
            check.add(partition, usage)
            usages[usage.request_id] = usage
        assert check.holds, check
        return len(usages) >= count

    await until(is_there)
    return usages


async def used_before(log: LogSettings, *names: str) -> None:
    """The last router has told so much, of all that ends."""
    writer = UsageWriter(log, Codec(), "router-z")
    await writer.take([0, 1])
    try:
        await writer.begin([0, 1], {("outcomes", p): 0 for p in (0, 1)})
        for name in names:
            harness, request = replicas(), fresh(name)
            harness.request(name)
            usage = usage_of(new_live_request(request, 0), builders.outcome(harness.works[0]))
            partition = partition_of(request.session_id, log.session_partitions)
            await writer.write(RecordUsage(usage, partition), None)
    finally:
        await writer.keep(())


def test_takeover_writes_only_missing_usage(kafka: LogSettings) -> None:
    async def main() -> None:
        async with stage(kafka) as on:
            await ended_before(on, "r0", "r1", "r2")
            await used_before(kafka, "r1")
            async with router(kafka), worker(on, "replica-a", Role.REPLICA, 4):
                usages = await committed_usage(kafka, 3)
                assert (usages["r0"].worker_ms, usages["r1"].worker_ms) == (40.0, 0.0)
                await serve(on, "r3")
                await committed_usage(kafka, 4)
            async with router(kafka, "router-b"), worker(on, "replica-b", Role.REPLICA, 4):
                await serve(on, "r4")
                assert (await committed_usage(kafka, 5)).keys() == {f"r{n}" for n in range(5)}

    run(main())


def test_router_writes_gathered_usage_on_shutdown(
    kafka: LogSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for the commit interval, which is an hour here."""
    monkeypatch.setattr(usage_module, "COMMIT_S", 3_600.0)

    async def main() -> None:
        async with stage(kafka) as on:
            async with router(kafka), worker(on, "replica-a", Role.REPLICA, 4):
                await serve(on, "r0")
                await on.until("journal", applied("outcomes"))
            assert (await committed_usage(kafka, 1)).keys() == {"r0"}

    run(main())


def test_router_writes_no_usage_of_requests_ended_before_upgrade(kafka: LogSettings) -> None:
    """Nor does any router after the first."""

    async def main() -> None:
        async with stage(kafka) as on:
            await ended_before(on, "old")
            for number, name in enumerate(("router-a", "router-b"), 1):
                async with router(kafka, name), worker(on, f"x{number}", Role.REPLICA, 4):
                    await serve(on, f"r{number}")
                    usages = await committed_usage(kafka, number)
                    assert usages.keys() == {f"r{n + 1}" for n in range(number)}

    run(main())
