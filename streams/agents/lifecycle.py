"""Runs the incarnations of a router: each joins, routes until something ends it, and shuts down.

`streams/agents/router.py` is one incarnation. Called by the command line.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from schemas.codec import Codec
from schemas.settings import LogSettings
from schemas.topics import live_ms_max
from streams.agents.app import make_app, marks_group
from streams.agents.partitions import OwnedPartitions
from streams.agents.router import RouterProcess
from streams.config import RouterSettings
from streams.log.admin import check_retention, needs_of_requests
from streams.log.cancellation import cancel_and_wait, run_within
from streams.log.connecting import query_client
from streams.log.faust.app import run_app
from streams.log.faust.watchdog import watch
from streams.log.retry import run_with_reconnect

log = logging.getLogger(__name__)

_WIND_UP_S = 15
MARK_S = 1.0  # between two commits of marks


async def run_router(
    log: LogSettings,
    router: RouterSettings,
    *,
    router_id: str,
    stop: asyncio.Event,
    codec: Codec | None = None,
    deadline_ms_max: int | None = None,
) -> None:
    """Route until `stop` is set, with a new incarnation whenever the log was unreachable.

    Raises any other error that ended one, and ConfigError if the log's retention is too short.
    `deadline_ms_max` is the gateways' setting; without it, the longest possible one is assumed.
    """
    epoch = 0
    needs = needs_of_requests(deadline_ms_max or live_ms_max())
    needs["sessions"] = ("router.session_ttl_ms", router.session_ttl_ms)

    async def life() -> None:
        nonlocal epoch
        if not epoch:
            await check_retention(log, needs)
        process = RouterProcess(log, router, router_id=router_id, codec=codec, former_epoch=epoch)
        try:
            await process.join()
            epoch = process.membership.epoch
            await _route(process, stop)
        finally:
            await process.close()

    await run_with_reconnect(router_id, life, stop)


async def _route(process: RouterProcess, stop: asyncio.Event) -> None:
    partitions = OwnedPartitions(process)
    app = make_app(process.log, process.router_id, process, partitions)
    loops: Sequence[Any] = (
        process.outbox.run(),
        process.membership.run(),
        process.prefixes.run(),
        process.retriever.run(),
        process.tick(),
        process.keep_snapshots(),
        watch(process.log, process.group, process.settings.stall_exit_ms),
        keep_marks(process.log, partitions.marks),
        process.group.wait_for_failure(),
        run_app(app),
        stop.wait(),
    )
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        finished_tasks, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in finished_tasks:
            task.result()
    finally:
        await _shut_down(partitions, app, tasks)


async def _shut_down(
    partitions: OwnedPartitions, app: Any, tasks: Sequence[asyncio.Task[Any]]
) -> None:
    """Stop reading, and send what was decided while the lease is valid.

    Bounded in time: the next owner rebuilds the rest from the log.
    """
    process = partitions.process
    outbox, _membership, *other_tasks = tasks
    for task in other_tasks:
        task.cancel()
    if not process.membership.is_valid():  # another may route in its place
        outbox.cancel()
        process.outbox.discard()
    if not await run_within(_WIND_UP_S, _finish(partitions, app, outbox)):
        log.warning("%s: gave up winding down after %d s", process.router_id, _WIND_UP_S)
    await cancel_and_wait(*tasks)


async def _finish(partitions: OwnedPartitions, app: Any, outbox: asyncio.Task[Any]) -> None:
    process = partitions.process
    await app.stop()
    await partitions.stop_takeover()
    process.stop_journal()
    process.flush()
    if not outbox.done():
        process.usage.hurry()
        await process.outbox.drain()


async def keep_marks(log: LogSettings, current: Callable[[], dict[int, int]]) -> None:
    """Commit from where a takeover has to read, whenever that changes, until cancelled.

    A mark is the offset, committed in a group of its own, before which every request has ended and
    its outcome is in the log. So a takeover depends on no time horizon, no longest deadline, and
    not on the offsets that Faust commits as soon as a request is placed. A failed commit only costs
    a longer rebuild.
    """
    places = [
        TopicPartition(f"{log.topic_prefix}requests", p) for p in range(log.session_partitions)
    ]
    committed_marks: dict[int, int] = {}
    async with query_client(log, marks_group(log)) as consumer:
        consumer.assign(places)
        consumer.pause(*places)  # it only commits
        while True:
            await asyncio.sleep(MARK_S)
            marks = current()
            changed = {places[p]: at for p, at in marks.items() if committed_marks.get(p) != at}
            with contextlib.suppress(KafkaError):
                if changed:
                    await consumer.commit(changed)
                    committed_marks = marks
