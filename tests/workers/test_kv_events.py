"""What a worker publishes of its prefix cache, and when."""

from collections import deque

import pytest
from aiokafka.errors import KafkaTimeoutError

from schemas import prefix
from schemas.records import KvEvents, TokenFrame
from tests.virtual_time import virtual
from tests.waits import pass_time, until
from tests.workers.fakes import EPOCH, WORKER, out, work
from tests.workers.running_worker import RunningWorker, running_worker
from workers import kv_events
from workers.kv.block_log import BlockLog


@pytest.fixture(autouse=True)
def _frequent_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "INTERVAL_MS", 1)


class RouterView:
    """A router's view of a worker's cache, by the rules of the record."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.next_seq = 0
        self.snapshots = 0
        self.inside = False  # a snapshot

    def apply(self, events: KvEvents) -> None:
        assert (events.worker_id, events.epoch, events.block_size) == (WORKER, EPOCH, 16)
        assert events.seq >= self.next_seq
        if events.snapshot:
            self.blocks.clear()
            self.snapshots += 1
        else:
            assert events.seq == self.next_seq
            assert self.inside or not events.has_more
        self.inside, self.next_seq = events.has_more, events.seq + 1
        self.blocks.difference_update(prefix.unpack(events.removed))
        self.blocks.update(prefix.unpack(events.stored))


def router_view(worker: RunningWorker) -> RouterView:
    view = RouterView()
    for record in worker.log.of(KvEvents):
        view.apply(record)
    return view


async def start_worker(worker: RunningWorker, *blocks: int) -> BlockLog:
    log = worker.engine.block_log = BlockLog(16, 100)
    log.add(blocks)
    await worker.start()
    await worker.ready()
    await until(lambda: worker.log.of(KvEvents) != [])
    return log


async def stop_worker(worker: RunningWorker) -> None:
    worker.stop.set()
    await worker.wait_for_exit()


async def test_kv_events_start_with_snapshot_and_continue_with_changes() -> None:
    worker = RunningWorker()
    blocks = await start_worker(worker, 1, 2)
    (first,) = worker.log.of(KvEvents)
    assert (first.seq, first.snapshot, first.has_more) == (0, True, False)
    blocks.add([3])
    blocks.discard([1])
    await until(lambda: router_view(worker).blocks == {2, 3})
    assert router_view(worker).snapshots == 1
    assert [entry[:3] for entry in worker.log.sends if entry[0] == "prefixes"][-1] == (
        "prefixes",
        0,
        WORKER,
    )
    await stop_worker(worker)


@virtual
async def test_kv_events_report_empty_cache_once() -> None:
    worker = RunningWorker()
    await start_worker(worker)
    await pass_time(1)
    (only,) = worker.log.of(KvEvents)
    assert (only.snapshot, only.stored, only.removed) == (True, b"", b"")
    await stop_worker(worker)


async def test_kv_events_limit_blocks_per_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "BLOCKS_MAX", 2)
    worker = RunningWorker()
    blocks = await start_worker(worker, 1, 2, 3, 4, 5)
    parts = worker.log.of(KvEvents)
    assert [(p.seq, p.snapshot, p.has_more) for p in parts] == [
        (0, True, True),
        (1, False, True),
        (2, False, False),
    ]
    assert router_view(worker).blocks == {1, 2, 3, 4, 5}
    blocks.clear()
    blocks.add([7, 8, 9])
    await until(lambda: router_view(worker).blocks == {7, 8, 9})
    assert all(len(p.stored) + len(p.removed) <= 16 for p in worker.log.of(KvEvents))
    await stop_worker(worker)


async def test_kv_events_send_snapshot_to_new_router() -> None:
    worker = RunningWorker()
    await start_worker(worker, 1, 2)
    worker.membership.add_router("router-a")
    await until(lambda: router_view(worker).snapshots == 2)
    assert router_view(worker).blocks == {1, 2}
    await stop_worker(worker)


@virtual
async def test_kv_events_repeat_snapshot_periodically(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "SNAPSHOT_INTERVAL_S", 1)
    worker = RunningWorker()
    await start_worker(worker, 1)
    await until(lambda: router_view(worker).snapshots >= 2)
    await stop_worker(worker)


@pytest.mark.parametrize("how", ["refused", "not acknowledged"])
async def test_kv_events_send_snapshot_after_failed_send(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = RunningWorker()
    blocks = await start_worker(worker, 1)
    if how == "refused":
        worker.log.refusing.add("prefixes")
    else:
        worker.log.errors["prefixes"] = deque([KafkaTimeoutError()])
    blocks.add([2])
    await until(lambda: "KV events not sent" in caplog.text)
    worker.log.refusing.clear()
    await until(lambda: router_view(worker).snapshots == 2)
    assert router_view(worker).blocks == {1, 2}
    await stop_worker(worker)


async def test_kv_events_block_no_tokens_during_slow_send() -> None:
    worker = RunningWorker()
    blocks = await start_worker(worker, 1)
    worker.log.held_acks["prefixes"] = []
    blocks.add([2])
    await until(lambda: worker.log.held_acks["prefixes"] != [])
    await worker.submit(work())
    worker.engine.say(out(ids=[5], text="a"))
    await until(lambda: worker.log.of(TokenFrame) != [])
    worker.engine.say(out(finish_reason="stop"))
    await stop_worker(worker)


@virtual
async def test_kv_events_pause_while_lease_is_doubtful() -> None:
    worker = RunningWorker()
    blocks = await start_worker(worker, 1)
    worker.membership.valid = False
    blocks.add([2])
    await pass_time(1)
    assert router_view(worker).blocks == {1}
    await stop_worker(worker)


async def test_kv_events_need_block_log_of_engine() -> None:
    async with running_worker() as worker:
        worker.membership.add_router("router-a")
        await until(lambda: worker.membership.beats[-1] != [])
        assert worker.log.of(KvEvents) == []
