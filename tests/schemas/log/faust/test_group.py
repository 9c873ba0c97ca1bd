"""A group's member: what a rebalance changes, and that nothing leaves an agent."""

import asyncio

import pytest

from schemas.log.faust.group import Group
from tests.waiting import until

PLACE = ("requests", 0)


async def test_a_failure_ends_the_life_and_not_the_agent() -> None:
    """Faust would acknowledge the record and go on."""
    group = Group()

    async def taking() -> None:
        raise AssertionError("a bug")

    agent = asyncio.create_task(group.guard(taking()))
    await until(lambda: group.has_failed)
    group.fail(ValueError("a later one"))
    for _ in range(2):
        with pytest.raises(AssertionError, match="a bug"):
            await group.wait_for_failure()
    assert not agent.done()
    agent.cancel()


async def test_what_succeeds_returns() -> None:
    group = Group()
    await group.guard(asyncio.sleep(0))
    assert not group.has_failed


async def test_a_rebalance_forgets_what_others_may_read() -> None:
    group, acknowledged = Group(), list[str]()
    group.on_assigned({PLACE})
    group.next_offsets[PLACE] = 7
    receipt = group.receipts.open(PLACE, lambda: acknowledged.append("r"))
    group.on_revoked()
    receipt.settle()
    assert (group.owned, group.next_offsets, group.rebalances, acknowledged) == (
        frozenset(),
        {},
        2,
        [],
    )


async def test_what_is_unread_is_known_of_partitions_of_which_something_was_read() -> None:
    group, other = Group(), ("requests", 1)
    group.on_assigned({PLACE, other})
    assert group.unread_count({PLACE: 9, other: 4}) == 0
    group.next_offsets[PLACE] = 7
    assert group.unread_count({PLACE: 9, other: 4}) == 2
    assert group.unread_count({PLACE: 6}) == 0, "the last fetch was before it"
