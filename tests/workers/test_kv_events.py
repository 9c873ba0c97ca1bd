"""What a worker publishes of its prefix cache, and when."""

from collections import deque
from typing import Any

import pytest
from aiokafka.errors import KafkaTimeoutError

from schemas import prefix
from schemas.errors import ConfigError
from schemas.records import KvEvents, TokenFrame
from tests.waiting import pass_time, until
from tests.workers.fakes import EPOCH, WORKER, out, work
from tests.workers.running_worker import Life, life
from workers.config import WorkerSettings
from workers.kv.block_log import BlockLog

QUICK = {"kv_events_interval_ms": 1}


class Known:
    """A router's view, by the rules of the record."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.next_seq = 0
        self.snapshots = 0
        self.inside = False  # a snapshot

    def apply(self, found: KvEvents) -> None:
        assert (found.worker_id, found.epoch, found.block_size) == (WORKER, EPOCH, 16)
        assert found.seq >= self.next_seq
        if found.snapshot:
            self.blocks.clear()
            self.snapshots += 1
        else:
            assert found.seq == self.next_seq
            assert self.inside or not found.more
        self.inside, self.next_seq = found.more, found.seq + 1
        self.blocks.difference_update(prefix.unpack(found.removed))
        self.blocks.update(prefix.unpack(found.stored))


def known(found: Life) -> Known:
    view = Known()
    for record in found.log.of(KvEvents):
        view.apply(record)
    return view


async def started(found: Life, *blocks: int) -> BlockLog:
    log = found.engine.block_log = BlockLog(16, 100)
    log.stored(blocks)
    await found.start()
    await found.ready()
    await until(lambda: found.log.of(KvEvents) != [])
    return log


async def ended(found: Life) -> None:
    found.stop.set()
    await found.ended()


async def test_it_begins_with_a_snapshot_and_goes_on_with_changes() -> None:
    found = Life(**QUICK)
    blocks = await started(found, 1, 2)
    (first,) = found.log.of(KvEvents)
    assert (first.seq, first.snapshot, first.more) == (0, True, False)
    blocks.stored([3])
    blocks.removed([1])
    await until(lambda: known(found).blocks == {2, 3})
    assert known(found).snapshots == 1
    assert [entry[:3] for entry in found.log.sent if entry[0] == "prefixes"][-1] == (
        "prefixes",
        0,
        WORKER,
    )
    await ended(found)


async def test_an_empty_cache_is_told_too_and_silence_follows() -> None:
    found = Life(**QUICK)
    await started(found)
    await pass_time(0.02)
    (only,) = found.log.of(KvEvents)
    assert (only.snapshot, only.stored, only.removed) == (True, b"", b"")
    await ended(found)


async def test_parts_are_bounded() -> None:
    found = Life(**QUICK, kv_events_blocks_max=2)
    blocks = await started(found, 1, 2, 3, 4, 5)
    parts = found.log.of(KvEvents)
    assert [(p.seq, p.snapshot, p.more) for p in parts] == [
        (0, True, True),
        (1, False, True),
        (2, False, False),
    ]
    assert known(found).blocks == {1, 2, 3, 4, 5}
    blocks.cleared()
    blocks.stored([7, 8, 9])
    await until(lambda: known(found).blocks == {7, 8, 9})
    assert all(len(p.stored) + len(p.removed) <= 16 for p in found.log.of(KvEvents))
    await ended(found)


async def test_a_router_that_joins_gets_a_snapshot() -> None:
    found = Life(**QUICK)
    await started(found, 1, 2)
    found.membership.add_router("router-a")
    await until(lambda: known(found).snapshots == 2)
    assert known(found).blocks == {1, 2}
    await ended(found)


async def test_everything_is_told_now_and_then() -> None:
    found = Life(**QUICK, kv_snapshot_interval_s=1)
    await started(found, 1)
    await until(lambda: known(found).snapshots >= 2)
    await ended(found)


@pytest.mark.parametrize("how", ["refused", "not acknowledged"])
async def test_a_batch_that_fails_makes_the_next_one_a_snapshot(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = Life(**QUICK)
    blocks = await started(found, 1)
    if how == "refused":
        found.log.refusing.add("prefixes")
    else:
        found.log.errors["prefixes"] = deque([KafkaTimeoutError()])
    blocks.stored([2])
    await until(lambda: "KV events not sent" in caplog.text)
    found.log.refusing.clear()
    await until(lambda: known(found).snapshots == 2)
    assert known(found).blocks == {1, 2}
    await ended(found)


async def test_a_send_that_hangs_holds_no_token_up() -> None:
    found = Life(**QUICK)
    blocks = await started(found, 1)
    found.log.held_acks["prefixes"] = []
    blocks.stored([2])
    await until(lambda: found.log.held_acks["prefixes"] != [])
    await found.held(work())
    found.engine.say(out(ids=[5], text="a"))
    await until(lambda: found.log.of(TokenFrame) != [])
    found.engine.say(out(finish_reason="stop"))
    await ended(found)


async def test_a_worker_in_doubt_of_its_lease_says_nothing() -> None:
    found = Life(**QUICK)
    blocks = await started(found, 1)
    found.membership.valid = False
    blocks.stored([2])
    await pass_time(0.02)
    assert known(found).blocks == {1}
    await ended(found)


async def test_an_engine_without_a_log_publishes_nothing() -> None:
    more: dict[str, Any] = QUICK
    async with life(**more) as found:
        found.membership.add_router("router-a")
        await until(lambda: found.membership.beats[-1] != [])
        assert found.log.of(KvEvents) == []


def test_a_batch_has_to_fit_the_log() -> None:
    with pytest.raises(ConfigError, match="kv_events_blocks_max: expected at most 65536"):
        WorkerSettings(kv_events_blocks_max=65_537)
