"""How many prompts are asked at once."""

import asyncio

import pytest

from schemas.fleet import Member
from schemas.records import Role
from streams.bridge.turns.slots import ModelSlots, Slots, limit
from tests.streams import builders


def worker(name: str, role: Role, **credits: int) -> Member:
    member = Member(registration=builders.registration(name), seen_ms=0)
    member.credits = {(router, role): count for router, count in credits.items()}
    return member


def test_slot_limit_divides_share_between_bridges() -> None:
    """Workers keep the other credits for other clients."""
    workers = [
        worker("decode-0", Role.DECODE, r0=30, r1=30),
        worker("replica-0", Role.REPLICA, r0=40),
        worker("prefill-0", Role.PREFILL, r0=500),
    ]
    assert limit(workers, 1, share=0.8, in_flight_max=512) == 80
    assert limit(workers, 2, share=0.8, in_flight_max=512) == 40
    assert limit(workers, 2, share=0.8, in_flight_max=16) == 16
    assert limit(workers, 1_000, share=0.8, in_flight_max=16) == 1, "each gets on"
    assert limit([], 1, share=0.8, in_flight_max=16) == 0, "nobody serves"


@pytest.mark.anyio
async def test_slots_go_to_waiters_in_order() -> None:
    room, got = 1, list[int]()
    slots = Slots(lambda: room)

    async def take(number: int) -> None:
        await slots.acquire()
        got.append(number)

    tasks = [asyncio.create_task(take(number)) for number in range(4)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert got == [0] and slots.waiting == 3
    tasks[1].cancel()
    await asyncio.sleep(0)
    assert slots.waiting == 2
    room = 2
    slots.hand_out()
    await tasks[2]
    slots.release()
    await tasks[3]
    assert got == [0, 2, 3] and slots.in_use == 2 and slots.waiting == 0
    slots.release()
    slots.release()
    assert not slots._in_use


@pytest.mark.anyio
async def test_slots_take_back_slot_of_cancelled_waiter() -> None:
    room = 0
    slots = Slots(lambda: room)
    task = asyncio.create_task(slots.acquire())
    await asyncio.sleep(0)
    room = 1
    slots.hand_out()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and not slots._in_use, "nobody has any, nor owes one"


@pytest.mark.anyio
async def test_slots_favour_owner_with_fewest() -> None:
    slots, got = Slots(lambda: 2), list[str]()

    async def take(owner: str) -> None:
        await slots.acquire(owner)
        got.append(owner)

    tasks = [asyncio.create_task(take(owner)) for owner in "aaaaabbc"]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert got == ["a", "a"] and slots.in_use == 2
    for owner in "aabc":
        slots.release(owner)
        await asyncio.sleep(0)
    assert got == ["a", "a", "b", "a", "c", "b"], "a and c have none when the second one is free"
    for task in tasks:
        task.cancel()


@pytest.mark.anyio
async def test_model_without_worker_takes_no_slots_of_others() -> None:
    limits = {"a": 2, "away": 0}
    slots = ModelSlots(limits, lambda model, used: min(limits[model], 3 - used))
    waiting = asyncio.ensure_future(slots.of("away").acquire("pair"))
    for _ in range(2):
        await slots.of("a").acquire("pair")
    assert not waiting.done()
    limits["away"] = 2
    slots.hand_out()
    await waiting
    full = asyncio.ensure_future(slots.of("away").acquire("pair"))
    await asyncio.sleep(0)
    assert slots.of("away").waiting == 1, "the limit of all models is used up"
    slots.of("a").release("pair")
    slots.hand_out()
    await full
