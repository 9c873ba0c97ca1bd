"""Restarts every process under load, then kills brokers, and counts failed requests.

`make rolling`, or `trivium bench rolling --quick`. Conversations arrive at a rate. If a gateway
refuses a call, their client tries the next one, as behind a load balancer; it does not retry an
answer that has begun. First each process gets SIGTERM, the next one when all are ready. Then, with
three brokers, one of them gets SIGKILL every minute. `checker.py` checks both parts. Writes
build/bench/rolling.json.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from rich.console import Console

from infra.bench.benchmark import Benchmark, BenchmarkResult, option
from infra.bench.faults import verdict
from infra.bench.faults.chaos import DRAIN_S, PLAN, judged
from infra.bench.faults.conversations import ConversationLoad
from infra.bench.faults.http_clients import Balanced
from infra.bench.results import BENCH_DIR, at_most, table
from infra.bench.stacks import MODEL, SIM, make_stack, urls
from infra.broker.quorum import BrokerCluster
from infra.broker.section import BrokerSettings
from infra.stack.launcher import Stack
from infra.stack.rolling import restart
from schemas.settings import LogSettings
from streams.log.connecting import client_options

BROKER = BrokerSettings(port=0, heap_mb=256, start_timeout_s=200.0, stop_timeout_s=1.0)
AWAY_S = 5.0  # from the kill of a broker to its restart
ACCEPT_MS = 20_000  # long enough for a partition to get a new leader
LEAD_S = 5.0  # of load before the first fault and after the last
BACK_S = 240.0
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingOptions:
    """Sets the load and the number of brokers to kill."""

    rate: float = option(30.0, "requests/s")
    minutes: int = option(5, "brokers killed, one a minute; 0: none")
    minute_s: float = option(60.0, "s between two such kills")
    seed: int = option(1)


async def run(options: RollingOptions, console: Console) -> BenchmarkResult:
    """Restart every process under load, then kill brokers; report failures."""
    rows = {"restarts": await _restarts(options, console)}
    if options.minutes:
        rows["brokers"] = await _brokers(options, console)
    bars, summary = [], {}
    for name, row in rows.items():
        for line in verdict.examples(row):
            console.print(line, markup=False, soft_wrap=True)
        clients = row["clients"]
        failed = clients["not_answered"]["count"] + row["never_ended"]
        wrong = sum(bar.value or 0 for bar in verdict.nought(row))
        bars.append(at_most(f"{name}: failed requests", failed, 0))
        bars.append(at_most(f"{name}: what the checker found", wrong, 0))
        longest_s = max((stall["max_s"] for stall in row["stalls"].values()), default=0.0)
        summary[name] = {
            "requests": clients["answers"], "failed": failed, "longest_stall_s": longest_s
        }  # fmt: skip
    tables = [table("Failed requests", summary)]
    return BenchmarkResult(figures=rows, bars=bars, tables=tables, load={"sim": SIM})


async def _restarts(options: RollingOptions, console: Console) -> dict[str, Any]:
    away_s: dict[str, float] = {}

    def on_restart(name: str, seconds: float) -> None:
        away_s[name] = round(seconds, 1)
        console.print(f"restarted {name}: ready again after {seconds:.1f} s")

    stack = make_stack(PLAN, BENCH_DIR.absolute() / "rolling")

    async def disturb() -> None:
        await restart((), folder=stack.folder, process_timeout_s=BACK_S, on_restart=on_restart)

    return {**await _under_load(stack, options, disturb), "ready_again_s": away_s}


async def _brokers(options: RollingOptions, console: Console) -> dict[str, Any]:
    folder = BENCH_DIR.absolute() / "rolling-brokers"
    stack = make_stack(replace(PLAN, broker=False), folder)
    cluster = BrokerCluster(BROKER, folder / "brokers")
    log = LogSettings(bootstrap=cluster.start(), replication_factor=3, request_timeout_ms=30_000)
    gateway = replace(stack.settings.gateway, accept_ms=ACCEPT_MS)
    stack.settings = replace(stack.settings, log=log, gateway=gateway)
    killed: list[int] = []

    async def disturb() -> None:
        for number in range(options.minutes):
            due_s = time.monotonic() + options.minute_s
            node = number % len(cluster.brokers) + 1
            os.kill(cluster.brokers[node].pid, signal.SIGKILL)
            killed.append(node)
            console.print(f"killed broker {node}")
            await asyncio.sleep(AWAY_S)
            cluster.brokers[node].spawn()
            async with asyncio.timeout(BACK_S):
                while True:
                    if await _is_in_sync(log):
                        break
                    await asyncio.sleep(_LOOK_S)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    try:
        return {**await _under_load(stack, options, disturb), "killed": killed}
    finally:
        cluster.reset()


async def _is_in_sync(log: LogSettings) -> bool:
    """Return whether all replicas of all partitions are in sync. Uses a new client each time: an
    old one would keep asking the broker that was killed."""
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
    stack: Stack, options: RollingOptions, disturb: Callable[[], Awaitable[None]]
) -> dict[str, Any]:
    """Run the load, call `disturb` meanwhile, and return the checker's findings."""
    findings: dict[str, Any] = {}
    async with judged(stack, options.seed, findings) as history:
        client = Balanced(urls(stack), MODEL, random.Random(options.seed))
        load = ConversationLoad(
            client, rate=options.rate, seed=options.seed, on_answer=history.record_answer
        )
        asking = asyncio.create_task(load.run())
        await asyncio.sleep(LEAD_S)
        await disturb()
        await asyncio.sleep(LEAD_S)
        load.is_over = True
        await asking
        never_ended = await load.drain(DRAIN_S)
    return {**findings, "never_ended": never_ended, "not_asked": load.left_out}


BENCHMARK = Benchmark(
    "rolling", __doc__, run, full=RollingOptions(), quick=RollingOptions(rate=15.0, minutes=0),
    quick_help="15 requests/s, and only restarts",
)  # fmt: skip
