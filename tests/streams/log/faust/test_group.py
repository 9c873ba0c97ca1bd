"""A group's member: what a rebalance changes, and that nothing leaves an agent."""

import asyncio

import pytest

from streams.log.faust.group import Group
from tests.waits import until

PLACE = ("requests", 0)


async def test_group_failure_ends_session_but_not_agent() -> None:
    """If the agent ended, Faust would acknowledge the record and continue."""
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


async def test_group_guard_returns_after_success() -> None:
    group = Group()
    await group.guard(asyncio.sleep(0))
    assert not group.has_failed


async def test_rebalance_clears_offsets_and_receipts() -> None:
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


async def test_unread_count_covers_only_partitions_read_before() -> None:
    group, other_place = Group(), ("requests", 1)
    group.on_assigned({PLACE, other_place})
    assert group.unread_count({PLACE: 9, other_place: 4}) == 0
    group.next_offsets[PLACE] = 7
    assert group.unread_count({PLACE: 9, other_place: 4}) == 2
    assert group.unread_count({PLACE: 6}) == 0, "the last fetch was before it"
