"""Every process is restarted under load, and then brokers die: requests that fail.

`make rolling`, or `trivium bench rolling --quick`. Conversations arrive at a rate. Their client
goes to the next gateway where one takes nothing, as behind a load balancer, and never asks again
what has begun. First each process gets SIGTERM, the next one when all are ready; then, over three
brokers, one of them SIGKILL every minute. `checker.py` judges both. Writes
build/bench/rolling.json.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from rich.console import Console
from rich.table import Table

from infra.bench.benchmark import Benchmark, Findings, offered
from infra.bench.faults import chaos, judging
from infra.bench.faults.conversation_load import Load
from infra.bench.faults.history import History
from infra.bench.faults.http_clients import Balanced
from infra.bench.faults.log_audit import settled
from infra.bench.faults.target_stack import MODEL, SIM, make_stack, urls
from infra.bench.results import BENCH_DIR, Bar, at_most
from infra.broker.quorum import BrokerCluster
from infra.broker.section import BrokerSettings
from infra.stack.launcher import Stack
from infra.stack.rolling import restart
from schemas.log.connecting import client_options
from schemas.settings import LogSettings

RESTARTS, BROKERS = "restarts", "brokers"
BROKER = BrokerSettings(port=0, heap_mb=256, start_timeout_s=200.0, stop_timeout_s=1.0)
AWAY_S = 5.0  # a broker that was killed
ACCEPT_MS = 20_000  # a leader changes meanwhile
LEAD_S = 5.0  # of the load, before the first is hurt and after the last
BACK_S = 240.0
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How much load, and how many brokers die."""

    rate: float = offered(30.0, "requests/s")
    minutes: int = offered(5, "brokers killed, one a minute; 0: none")
    minute_s: float = offered(60.0, "s between two such kills")
    seed: int = offered(1)


async def run(options: Options, console: Console) -> Findings:
    """Both parts."""
    rows = {RESTARTS: await _restarts(options, console)}
    if options.minutes:
        rows[BROKERS] = await _brokers(options, console)
    for row in rows.values():
        for line in judging.examples(row):
            console.print(line, markup=False, soft_wrap=True)
    return Findings(
        figures=rows,
        bars=[bar for name, row in rows.items() for bar in bars(name, row)],
        shown=[table(rows)],
        load={"sim": SIM},
    )


async def _restarts(options: Options, console: Console) -> dict[str, Any]:
    away_s: dict[str, float] = {}

    def told(name: str, seconds: float) -> None:
        away_s[name] = round(seconds, 1)
        console.print(f"restarted {name}: ready again after {seconds:.1f} s")

    stack = make_stack(chaos.PLAN, BENCH_DIR.absolute() / "rolling")
    hurt = partial(restart, (), folder=stack.folder, timeout_s=BACK_S, on_restart=told)
    found = await _under_load(stack, options, hurt)
    return {**found, "ready_again_s": away_s}


async def _brokers(options: Options, console: Console) -> dict[str, Any]:
    folder = BENCH_DIR.absolute() / "rolling-brokers"
    stack = make_stack(replace(chaos.PLAN, broker=False), folder)
    cluster = BrokerCluster(BROKER, folder / "brokers")
    log = LogSettings(bootstrap=cluster.start(), replication_factor=3, request_timeout_ms=30_000)
    gateway = replace(stack.settings.gateway, accept_ms=ACCEPT_MS)
    stack.settings = replace(stack.settings, log=log, gateway=gateway)
    killed: list[int] = []

    async def hurt() -> None:
        for number in range(options.minutes):
            due_s = time.monotonic() + options.minute_s
            node = number % len(cluster.brokers) + 1
            os.kill(cluster.brokers[node].pid, signal.SIGKILL)
            killed.append(node)
            console.print(f"killed broker {node}")
            await asyncio.sleep(AWAY_S)
            cluster.brokers[node].spawn()
            await whole(log)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    try:
        return {**await _under_load(stack, options, hurt), "killed": killed}
    finally:
        cluster.reset()


async def whole(log: LogSettings) -> None:
    """Wait until every partition has all of its copies in step; raises TimeoutError."""
    async with asyncio.timeout(BACK_S):
        while True:
            if await _is_whole(log):
                return
            await asyncio.sleep(_LOOK_S)


async def _is_whole(log: LogSettings) -> bool:
    """Asked anew each time: an admin client goes on asking the broker that was killed."""
    admin = AIOKafkaAdminClient(**client_options(log), client_id="rolling")
    try:
        await admin.start()
        partitions = [p for t in await admin.describe_topics() for p in t["partitions"]]
        return all(len(p["isr"]) == len(p["replicas"]) for p in partitions)
    except KafkaError:
        return False
    finally:
        await admin.close()


async def _under_load(
    stack: Stack, options: Options, hurt: Callable[[], Awaitable[None]]
) -> dict[str, Any]:
    """Ask, and hurt meanwhile; what the checker found."""
    path = stack.folder / "history.jsonl"
    try:
        await stack.start()
        await chaos.put_documents(stack, options.seed)
        history = History(path)
        client = Balanced(urls(stack), MODEL, random.Random(options.seed))
        load = Load(client, rate=options.rate, seed=options.seed, told=history.answer)
        asking = asyncio.create_task(load.run())
        await asyncio.sleep(LEAD_S)
        await hurt()
        await asyncio.sleep(LEAD_S)
        load.is_over = True
        await asking
        never_ended = await load.drain(chaos.DRAIN_S)
        history.close()
        await settled(stack.settings.log)
        found = await judging.judged(judging.write_task(stack.settings, path))
    finally:
        await stack.stop(grace_s=10)
    return {**found, "never_ended": never_ended, "not_asked": load.left_out}


def bars(name: str, found: dict[str, Any]) -> list[Bar]:
    """Nothing fails, and what the checker counts is nought."""
    wrong = sum(bar.value or 0 for bar in judging.noughts(found))
    failed = found["clients"]["not_answered"]["count"] + found["never_ended"]
    return [
        at_most(f"{name}: failed requests", failed, 0, ""),
        at_most(f"{name}: what the checker found", wrong, 0, ""),
    ]


def table(rows: dict[str, dict[str, Any]]) -> Table:
    """Failed of all, and how long the rest waited."""
    shown = Table("part", "requests", "failed", "longest stall, s", title="Failed requests")
    for name, row in rows.items():
        failed = row["clients"]["not_answered"]["count"] + row["never_ended"]
        longest_s = max((each["max_s"] for each in row["stalls"].values()), default=0.0)
        shown.add_row(name, str(row["clients"]["answers"]), str(failed), f"{longest_s:.1f}")
    return shown


BENCHMARK = Benchmark(
    name="rolling",
    about=__doc__,
    run=run,
    full=Options(),
    quick=Options(rate=15.0, minutes=0),
    quick_said="15 requests/s, and only restarts",
)
