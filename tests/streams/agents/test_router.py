"""The router process: its clock, its journal, what it tells the core, and a core that fails."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import ConfigError, LeaseError
from schemas.records import (
    DecisionKind,
    Reason,
    Role,
)
from streams.agents import router
from streams.agents.router import load_table
from streams.config import RouterSettings
from streams.core.events import PartitionTaken, RequestArrived, Tick
from streams.core.handlers.dispatch import Dispatcher
from streams.core.placement.ppd_table import AXES, PpdCell, PpdTable
from streams.journal.journal import TICK
from streams.log.cancellation import cancel_and_wait
from streams.log.clock import wall_ms
from tests.streams import builders
from tests.streams.agents.fakes import (
    FakeEvent,
    router_with_partition,
)
from tests.streams.builders import T0
from tests.virtual_time import virtual
from tests.waits import pass_time, run


def test_process_ends_on_core_bug_without_acknowledging() -> None:
    async def main() -> None:
        partitions, _ = await router_with_partition()
        process = partitions.process

        def broken(event: object, now_ms: int) -> list[Any]:
            raise AssertionError("a bug")

        process.router.apply = broken  # type: ignore[method-assign]  # breaks it on purpose
        event = FakeEvent(process.codec.encode(builders.request("r1")))
        taking = asyncio.create_task(partitions.process.take("requests", event))
        with pytest.raises(AssertionError, match="a bug"):
            await process.group.wait_for_failure()
        assert not event.acks and not taking.done()
        taking.cancel()
        process.router.apply = lambda *_: pytest.fail("asked")  # type: ignore[method-assign]
        assert process.apply(Tick(), "tick", 0, 0) == []  # it is asked nothing more
        await partitions.process.take("requests", event)
        assert not event.acks

    run(main())


def test_core_failure_leaves_decision_that_names_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        partitions, producer = await router_with_partition()
        process = partitions.process

        def broken(*_: object) -> None:
            raise AssertionError("a bug")

        monkeypatch.setattr(Dispatcher, "dispatch_waiting", broken)
        request = builders.request("r1", deadline_ms=wall_ms() + 60_000)
        taking = asyncio.create_task(
            partitions.process.take("requests", FakeEvent(process.codec.encode(request)))
        )
        with pytest.raises(AssertionError, match="a bug"):
            await process.group.wait_for_failure()
        taking.cancel()
        sending = asyncio.create_task(process.outbox.run())
        await process.outbox.drain()
        (topic, decision, *_), *_ = producer.sends
        assert (topic, decision.request_id) == ("decisions", "r1")
        assert (decision.kind, decision.reason) == (
            DecisionKind.FAIL,
            Reason.ROUTER_RESTARTED,
        )
        sending.cancel()

    run(main())


def test_process_clock_never_runs_backwards() -> None:
    async def main() -> None:
        partitions, _ = await router_with_partition()
        process = partitions.process
        later = process._now_ms + 1_000
        process.apply(PartitionTaken(1), "taken", 1, 0, later)
        process.apply(PartitionTaken(2), "taken", 2, 0, later - 500)
        (batch,) = process.journal.cut(1)
        assert list(batch.now_ms) == sorted(batch.now_ms)

    run(main())


def test_process_fails_when_wall_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time would otherwise stand still, and every request would expire."""

    async def main() -> None:
        partitions, _ = await router_with_partition()
        process = partitions.process
        monkeypatch.setattr(router, "wall_ms", lambda: process._now_ms - 60_000)
        with pytest.raises(LeaseError, match="router-a: the clock was set back"):
            await process.tick()

    run(main())


@virtual
async def test_idle_router_ticks_and_journals_less_often() -> None:
    """From its first request on, it ticks as often as its settings say."""
    partitions, producer = await router_with_partition()
    process = partitions.process
    sending = asyncio.create_task(process.outbox.run())
    ticking = asyncio.create_task(process.tick())

    def lines() -> list[tuple[int, list[str]]]:
        """Of each batch since the last call, how many ticks, and what else."""
        batches = [record for topic, record, *_ in producer.sends if topic == "journal"]
        producer.sends.clear()
        kinds = [Counter(batch.topics) for batch in batches]
        return [(counts.pop(TICK, 0), sorted(counts)) for counts in kinds]

    await pass_time(1.0)
    lines()
    await pass_time(4.0)
    idle = lines()
    assert len(idle) <= 5 and 12 <= sum(ticks for ticks, _ in idle) <= 20
    assert not any(what for _, what in idle)
    request = builders.request("r1", deadline_ms=wall_ms() + 60_000)
    process.apply(RequestArrived(request, 0), "requests", 0, 0)
    await pass_time(0.1)
    assert [what for _, what in lines()] == [["requests"]], "its journal waits no longer"
    await pass_time(4.0)
    assert 75 <= sum(ticks for ticks, _ in lines()) <= 84
    await cancel_and_wait(sending, ticking)


def test_clock_offset_of_member_reaches_placement() -> None:
    """Heartbeats measure the offset of one life; the next registration clears it."""

    async def main() -> None:
        partitions, _ = await router_with_partition()
        process = partitions.process
        view, members = process.membership.view, process.router.tables.fleet.view.members

        def apply_record(record: Any, logged_ms: int) -> None:
            view.apply(record, 0, T0, logged_ms)
            process._apply_fleet_record(record, 0, T0)

        apply_record(builders.registration("d0", Role.DECODE), T0)
        apply_record(builders.beat("d0", 1, at_ms=T0 + 400), T0 + 10)
        assert members["d0"].ahead_ms == 390
        apply_record(builders.registration("d0", Role.DECODE, epoch=9), T0 + 20)
        assert members["d0"].ahead_ms == 0

    run(main())


def test_load_table_reads_policy_table_and_names_bad_file(tmp_path: Path) -> None:
    cell = PpdCell(bin=(0, 0, 0, 0), gain_ttft=0.5, loss_tpot=0.1, samples=9)
    table = PpdTable(dict.fromkeys(AXES, (1.0,)), [cell])
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table.to_dict()))
    loaded = load_table(RouterSettings(policy="table", table=str(path)))
    assert loaded is not None and loaded.to_dict() == table.to_dict()
    assert load_table(RouterSettings(policy="static", table=str(path))) is not None, "for wishes"
    assert load_table(RouterSettings()) is None
    for text, message in (("{", r"expected a JSON file .*table\.json"), ("{}", r".*table\.json: ")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=rf"router\.table: {message}"):
            load_table(RouterSettings(policy="table", table=str(path)))
