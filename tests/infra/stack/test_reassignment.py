"""Which workers can be moved from pool to pool."""

import asyncio
from dataclasses import replace

import pytest

from infra.stack import reassignment
from infra.stack.reassignment import find_worker, wait_for_worker
from schemas.errors import ConfigError
from schemas.fleet import LEASE_MS
from schemas.records import Role
from streams.log.clock import wall_ms
from tests.infra.watched_fleet import fleet
from tests.streams.builders import registration


def test_find_worker_accepts_only_language_model_workers() -> None:
    watch = fleet()
    search = replace(registration("search-0", Role.DECODE, partition=7), roles=[Role.RETRIEVAL])
    watch.view.apply(search, 100, wall_ms())
    embeds = replace(registration("embed-0", Role.DECODE, partition=7), roles=[Role.EMBEDDING])
    watch.view.apply(embeds, 101, wall_ms())
    assert find_worker(watch, "both-0").member_id == "both-0"
    with pytest.raises(
        ConfigError, match="no worker 'x' lives; expected one of: both-0, embed-0, prefill"
    ):
        find_worker(watch, "x")
    with pytest.raises(ConfigError, match="search-0 serves retrieval; expected a worker with a"):
        find_worker(watch, "search-0")
    with pytest.raises(ConfigError, match="embed-0 serves embedding; expected a worker with a"):
        find_worker(watch, "embed-0")


async def test_wait_for_worker_tolerates_short_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine no heartbeat may arrive for the length of a lease."""
    watch = fleet()
    watch.changed = asyncio.Event()
    for member in watch.view.members.values():
        member.seen_ms = wall_ms() - 2 * LEASE_MS
    finding = asyncio.create_task(wait_for_worker(watch, "both-0"))
    await asyncio.sleep(0)
    assert not finding.done()
    watch.view.members["both-0"].seen_ms = wall_ms()
    watch.changed.set()
    assert (await finding).member_id == "both-0"
    monkeypatch.setattr(reassignment, "SLOW_S", 0.01)
    with pytest.raises(ConfigError, match="no worker 'prefill-0' lives; expected one of: both-0"):
        await wait_for_worker(watch, "prefill-0")
    with pytest.raises(ConfigError, match="no worker 'x' lives"):
        await wait_for_worker(watch, "x")
