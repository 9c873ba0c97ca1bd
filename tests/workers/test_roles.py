"""A worker that is given other roles while it runs."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from schemas.errors import BrokerUnavailable, ConfigError
from schemas.fleet import HEARTBEAT_MS
from schemas.records import (
    AssignRoles,
    MemberState,
    Orchestration,
    Outcome,
    Phase,
    PhaseKind,
    Role,
    WorkPhase,
)
from streams.log.clock import wall_ms
from tests.virtual_time import virtual
from tests.waits import pass_time, until
from tests.workers.fakes import EPOCH, WORKER, capability, handle, out, work
from tests.workers.running_worker import RunningWorker
from workers.llm.stream import WorkerIdentity
from workers.roles import RoleOrders, check_roles, lease_topics

PREFILL, DECODE, REPLICA = Role.PREFILL, Role.DECODE, Role.REPLICA
ABLE = replace(capability(), orchestrations=(Orchestration.PREFILL_FIRST,))


def order(*roles: Role, worker_id: str = WORKER, epoch: int = EPOCH) -> AssignRoles:
    return AssignRoles(worker_id=worker_id, worker_epoch=epoch, roles=roles, at_ms=wall_ms())


@asynccontextmanager
async def worker_in_role(role: Role, topic: str) -> AsyncIterator[RunningWorker]:
    """A worker with one role, one lease, and a router that knows it."""
    worker = RunningWorker(role, running_max=4)
    worker.engine.capability = ABLE
    worker.log.leases = {topic: 1}
    await worker.start()
    await worker.ready()
    worker.membership.add_router("router-a")
    await until(lambda: granted(worker) == {role})
    try:
        yield worker
    finally:
        worker.stop.set()
        assert worker.task is not None
        worker.task.cancel()
        await asyncio.gather(worker.task, return_exceptions=True)


def granted(worker: RunningWorker) -> set[Role]:
    return {grant.role for grant in worker.membership.beats[-1]}


async def moved(worker: RunningWorker, topic: str, *roles: Role) -> None:
    worker.log.readers[topic].put(order(*roles))
    await until(lambda: worker.membership.roles[-1:] == [roles] and granted(worker) == {*roles})


@virtual
async def test_role_move_finishes_active_work_and_accepts_new_role() -> None:
    async with worker_in_role(PREFILL, "prefill") as worker:
        await worker.submit(work("r1", WorkPhase.PREFILL))
        await moved(worker, "prefill", DECODE)
        await pass_time(HEARTBEAT_MS / 1000)
        assert worker.membership.leases == {"prefill": 1, "decode": 3}
        assert worker.decode.partition == 3
        assert worker.decode.started_at == "latest"
        worker.log.readers["prefill"].put(work("r2", WorkPhase.PREFILL))
        await until(lambda: worker.log.of(Phase) != [])
        assert worker.log.of(Phase)[0].kind is PhaseKind.REFUSED
        kv = handle(wall_ms() + 60_000)
        worker.engine.say(out(ids=[5], text="a", finish_reason="handover", kv=kv))
        await until(lambda: len(worker.log.of(Phase)) == 2)
        assert worker.log.of(Phase)[1].kind is PhaseKind.PREFILL_DONE
        await worker.submit(work("r3"))
        worker.engine.say(out("r3.1", [5], "a", finish_reason="stop"))
        await until(lambda: worker.log.of(Outcome) != [])
        assert not worker.engine.closed
        assert worker.membership.states[-1] is MemberState.READY


@virtual
async def test_role_move_accepts_late_work_of_previous_role() -> None:
    async with worker_in_role(PREFILL, "prefill") as worker:
        moved_ms = wall_ms()
        await moved(worker, "prefill", DECODE)
        assert wall_ms() - moved_ms < HEARTBEAT_MS
        await worker.submit(work("r1", WorkPhase.PREFILL), work("r2"))
        await moved(worker, "decode", REPLICA)  # waits until the first move is done
        await worker.submit(work("r3"))
        worker.log.readers["prefill"].put(work("r4", WorkPhase.PREFILL))
        await until(lambda: worker.log.of(Phase) != [])
        (refused,) = worker.log.of(Phase)
        assert (refused.request_id, refused.kind) == ("r4", PhaseKind.REFUSED)


@virtual
async def test_worker_can_switch_roles_without_new_lease() -> None:
    async with worker_in_role(DECODE, "decode") as worker:
        await moved(worker, "decode", PREFILL, DECODE)
        await moved(worker, "prefill", DECODE)  # on either of its partitions
        await moved(worker, "decode", PREFILL, DECODE)
        assert worker.membership.leases == {"decode": 1, "prefill": 3}
        assert len(worker.membership.beats[-1]) == 2
        await worker.submit(work("r1", WorkPhase.PREFILL), work("r2"))


async def test_drain_finishes_work_of_all_roles() -> None:
    async with worker_in_role(PREFILL, "prefill") as worker:
        await moved(worker, "prefill", PREFILL, DECODE)
        await worker.submit(work("r1", WorkPhase.PREFILL), work("r2"))
        worker.stop.set()
        await until(lambda: worker.membership.states[-1] is MemberState.DRAINING)
        last = {"finish_reason": "length"}
        worker.engine.say(out("r1.1", [5], "a", **last), out("r2.1", [5], "a", **last))
        assert await worker.wait_for_exit() is None
        assert {outcome.request_id for outcome in worker.log.of(Outcome)} == {"r1", "r2"}
        assert worker.log.readers["prefill"].stopped
        assert worker.decode.stopped


async def test_roles_stay_without_free_partition(caplog: pytest.LogCaptureFixture) -> None:
    async with worker_in_role(PREFILL, "prefill") as worker:
        worker.membership.full.add("decode")
        worker.log.readers["prefill"].put(order(DECODE))
        await until(lambda: "roles stay as they are: all partitions of decode" in caplog.text)
        assert (worker.membership.roles, granted(worker)) == ([], {PREFILL})
        worker.membership.full.clear()
        await moved(worker, "prefill", DECODE)


async def test_restarted_worker_has_its_latest_roles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with worker_in_role(PREFILL, "prefill") as worker:
        await moved(worker, "prefill", DECODE)

        async def batch(**_: int) -> list[object]:
            raise BrokerUnavailable("decode cannot be read")

        monkeypatch.setattr(worker.decode, "batch", batch)
        worker.decode.put(work())
        await worker.lives(2)
        assert worker.membership.initial_roles == (DECODE,)


BAD = {
    "another worker": order(DECODE, worker_id="w2"),
    "an earlier life": order(DECODE, epoch=EPOCH - 1),
    "no role": order(),
    "an unknown role": order(Role.UNKNOWN),
    "two that share credits": order(DECODE, REPLICA),
}


@pytest.mark.parametrize("fault", BAD)
async def test_role_orders_ignore_invalid_orders(fault: str) -> None:
    followed = list[Sequence[Role]]()

    async def follow(roles: Sequence[Role]) -> None:
        followed.append(roles)

    orders = RoleOrders(WorkerIdentity(worker_id=WORKER, epoch=EPOCH), ABLE, follow)
    task = asyncio.create_task(orders.run())
    orders.take(BAD[fault])
    orders.take(order(PREFILL, PREFILL))  # a good one
    await until(lambda: followed != [])
    task.cancel()
    assert followed == [(PREFILL,)]


def test_role_check_requires_kv_handover_for_prefill() -> None:
    check_roles([REPLICA], capability())
    check_roles([PREFILL, DECODE], ABLE)
    with pytest.raises(ConfigError, match="the engine fake was not started for; it can be a rep"):
        check_roles([PREFILL], capability())


@pytest.mark.parametrize(
    ("roles", "topics"),
    [
        ([PREFILL], ["prefill"]),
        ([DECODE], ["decode"]),
        ([REPLICA], ["decode"]),
        ([REPLICA, PREFILL], ["prefill", "decode"]),
        ([DECODE, PREFILL], ["prefill", "decode"]),
    ],
)
def test_roles_determine_lease_topics(roles: list[Role], topics: list[str]) -> None:
    assert lease_topics(roles) == topics


@pytest.mark.parametrize(
    "roles", [[], [Role.UNKNOWN], [Role.RETRIEVAL], [Role.EMBEDDING], [DECODE, REPLICA]]
)
def test_lease_topics_reject_invalid_roles(roles: list[Role]) -> None:
    with pytest.raises(ConfigError, match="worker roles"):
        lease_topics(roles)
