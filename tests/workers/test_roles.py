"""A worker that is given other roles while it runs."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from schemas.errors import BrokerUnavailable, ConfigError
from schemas.fleet import HEARTBEAT_MS
from schemas.log.clock import wall_ms
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
from tests.virtual import virtual
from tests.waiting import pass_time, until
from tests.workers.fakes import EPOCH, WORKER, capability, handle, out, work
from tests.workers.running_worker import Life
from workers.llm.stream import Identity
from workers.roles import RoleOrders, check_roles, lease_topics

PREFILL, DECODE, REPLICA = Role.PREFILL, Role.DECODE, Role.REPLICA
ABLE = replace(capability(), orchestrations=(Orchestration.PREFILL_FIRST,))


def order(*roles: Role, worker_id: str = WORKER, epoch: int = EPOCH) -> AssignRoles:
    return AssignRoles(worker_id=worker_id, worker_epoch=epoch, roles=roles, at_ms=wall_ms())


@asynccontextmanager
async def worker(role: Role, topic: str) -> AsyncIterator[Life]:
    """A worker with one role, one lease, and a router that knows it."""
    found = Life(role, running_max=4)
    found.engine.capability = ABLE
    found.log.leases = {topic: 1}
    await found.start()
    await found.ready()
    found.membership.add_router("router-a")
    await until(lambda: granted(found) == {role})
    try:
        yield found
    finally:
        found.stop.set()
        assert found.task is not None
        found.task.cancel()
        await asyncio.gather(found.task, return_exceptions=True)


def granted(found: Life) -> set[Role]:
    return {grant.role for grant in found.membership.beats[-1]}


async def moved(found: Life, topic: str, *roles: Role) -> None:
    found.log.readers[topic].put(order(*roles))
    await until(lambda: found.membership.roles[-1:] == [roles] and granted(found) == {*roles})


@virtual
async def test_it_finishes_what_it_holds_and_takes_the_new_work() -> None:
    async with worker(PREFILL, "prefill") as found:
        await found.held(work("r1", WorkPhase.PREFILL))
        await moved(found, "prefill", DECODE)
        await pass_time(HEARTBEAT_MS / 1000)
        assert found.membership.leases == {"prefill": 1, "decode": 3}
        assert found.decode.partition == 3
        assert found.decode.started_at == "latest"
        found.log.readers["prefill"].put(work("r2", WorkPhase.PREFILL))
        await until(lambda: found.log.of(Phase) != [])
        assert found.log.of(Phase)[0].kind is PhaseKind.REFUSED
        kv = handle(wall_ms() + 60_000)
        found.engine.say(out(ids=[5], text="a", finish_reason="handover", kv=kv))
        await until(lambda: len(found.log.of(Phase)) == 2)
        assert found.log.of(Phase)[1].kind is PhaseKind.PREFILL_DONE
        await found.held(work("r3"))
        found.engine.say(out("r3.1", [5], "a", finish_reason="stop"))
        await until(lambda: found.log.of(Outcome) != [])
        assert not found.engine.closed
        assert found.membership.states[-1] is MemberState.READY


@virtual
async def test_work_that_was_sent_before_routers_heard_of_the_move_is_taken() -> None:
    async with worker(PREFILL, "prefill") as found:
        moved_ms = wall_ms()
        await moved(found, "prefill", DECODE)
        assert wall_ms() - moved_ms < HEARTBEAT_MS
        await found.held(work("r1", WorkPhase.PREFILL), work("r2"))
        await moved(found, "decode", REPLICA)  # waits until the first move is done
        await found.held(work("r3"))
        found.log.readers["prefill"].put(work("r4", WorkPhase.PREFILL))
        await until(lambda: found.log.of(Phase) != [])
        (refused,) = found.log.of(Phase)
        assert (refused.request_id, refused.kind) == ("r4", PhaseKind.REFUSED)


@virtual
async def test_it_can_have_both_roles_and_go_back_without_another_lease() -> None:
    async with worker(DECODE, "decode") as found:
        await moved(found, "decode", PREFILL, DECODE)
        await moved(found, "prefill", DECODE)  # on either of its partitions
        await moved(found, "decode", PREFILL, DECODE)
        assert found.membership.leases == {"decode": 1, "prefill": 3}
        assert len(found.membership.beats[-1]) == 2
        await found.held(work("r1", WorkPhase.PREFILL), work("r2"))


async def test_a_drain_of_several_roles_finishes_both() -> None:
    async with worker(PREFILL, "prefill") as found:
        await moved(found, "prefill", PREFILL, DECODE)
        await found.held(work("r1", WorkPhase.PREFILL), work("r2"))
        found.stop.set()
        await until(lambda: found.membership.states[-1] is MemberState.DRAINING)
        last = {"finish_reason": "length"}
        found.engine.say(out("r1.1", [5], "a", **last), out("r2.1", [5], "a", **last))
        assert await found.ended() is None
        assert {outcome.request_id for outcome in found.log.of(Outcome)} == {"r1", "r2"}
        assert found.log.readers["prefill"].stopped
        assert found.decode.stopped


async def test_without_a_free_partition_the_roles_stay(caplog: pytest.LogCaptureFixture) -> None:
    async with worker(PREFILL, "prefill") as found:
        found.membership.full.add("decode")
        found.log.readers["prefill"].put(order(DECODE))
        await until(lambda: "roles stay as they are: all partitions of decode" in caplog.text)
        assert (found.membership.roles, granted(found)) == ([], {PREFILL})
        found.membership.full.clear()
        await moved(found, "prefill", DECODE)


async def test_a_reader_that_fails_later_begins_a_life_with_the_same_roles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with worker(PREFILL, "prefill") as found:
        await moved(found, "prefill", DECODE)

        async def batch(**_: int) -> list[object]:
            raise BrokerUnavailable("decode cannot be read")

        monkeypatch.setattr(found.decode, "batch", batch)
        found.decode.put(work())
        await found.lives(2)
        assert found.membership.given == (DECODE,)


BAD = {
    "another worker": order(DECODE, worker_id="w2"),
    "an earlier life": order(DECODE, epoch=EPOCH - 1),
    "no role": order(),
    "an unknown role": order(Role.UNKNOWN),
    "two that share credits": order(DECODE, REPLICA),
}


@pytest.mark.parametrize("fault", BAD)
async def test_bad_orders_change_nothing(fault: str) -> None:
    followed = list[Sequence[Role]]()

    async def follow(roles: Sequence[Role]) -> None:
        followed.append(roles)

    orders = RoleOrders(Identity(worker_id=WORKER, epoch=EPOCH), ABLE, follow)
    task = asyncio.create_task(orders.run())
    orders.take(BAD[fault])
    orders.take(order(PREFILL, PREFILL))  # a good one
    await until(lambda: followed != [])
    task.cancel()
    assert followed == [(PREFILL,)]


def test_an_engine_that_hands_no_kv_over_can_only_be_a_replica() -> None:
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
def test_roles_choose_the_topics(roles: list[Role], topics: list[str]) -> None:
    assert lease_topics(roles) == topics


@pytest.mark.parametrize("roles", [[], [Role.UNKNOWN], [DECODE, REPLICA]])
def test_roles_that_make_no_worker(roles: list[Role]) -> None:
    with pytest.raises(ConfigError, match="worker roles"):
        lease_topics(roles)
