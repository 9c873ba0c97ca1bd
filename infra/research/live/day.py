"""A short day and night on stacks of this machine: autoscaled pools and fixed fleets.

The traffic, the targets and the comparison are those of `infra/research/studies/day_and_night.py`;
here processes with simulated engines answer over HTTP, and pools are autoscaled as by `trivium up
--autoscale`. A worker counts from the start of its process to its end. Fixed fleets are tried from
the largest size that the pools reached, with one worker less at a time as long as that holds: an
operator who sized them would know the load at noon.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx

from infra.bench.results import BENCH_DIR
from infra.planning.live_conversations import LiveLoad, LiveTurn, converse
from infra.planning.live_stack import Deployment, machine
from infra.research.studies.day_and_night import (
    HOLDS,
    Counts,
    Day,
    DayComparison,
    FleetResult,
    fleet_of,
)
from infra.scaling.settings import ScalingSettings
from infra.simulator.cluster import READY_MS
from infra.simulator.shape import ClusterShape
from infra.stack.autoscaler import Autoscaler
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from schemas.records import MemberKind, Role
from streams.config import RouterSettings
from workers.config import WorkerSettings

LOOK_S = 0.25
PROMPT_WORDS = 60
ENGINE: dict[str, Any] = {
    "prefill_base_ms": 300.0,
    "prefill_running_max": 1,
    "decode_step_ms": 40.0,
    "running_max": 6,
    "end_every_tokens": 0,
}
# Workers slow enough for two cores to run seven of them, and delays that fit so short a day.
DAY = Day(
    night_per_s=0.5,
    noon_per_s=6.0,
    minutes=4.0,
    prompt_tokens=PROMPT_WORDS,
    answer_tokens=40,
    ttft_ms=2_000,
    tpot_ms=100.0,
    start_ms=5_000.0,  # until a start is measured
    workers_max=8,
)
PATIENCE = {"up_after_ms": 1_000, "down_after_ms": 10_000, "settle_ms": 5_000}


async def compare_fleets(day: Day, report: Callable[[str], None]) -> DayComparison:
    """Serve the day with one fleet after the other; `report` gets each step in words."""
    with machine("sim", BENCH_DIR.absolute() / "day") as build:

        async def serve_pools(pools: str) -> FleetResult:
            report(f"{pools or 'pools that follow'}: {day.minutes:g} minutes, load {_load()}")
            shape = ClusterShape.parse(pools or "1P1D")
            plan = StackPlan(prefill=shape.prefill, decode=shape.decode, broker=False)
            deployment = Deployment(name=f"day-{pools or 'follows'}", variants=(), engine=ENGINE)
            stack = build(deployment, plan)
            stack.settings = replace(
                stack.settings,
                scaling=targets(day),
                worker=WorkerSettings(engine="sim"),
                router=RouterSettings(policy="static"),  # decode workers compute no prompts
            )
            fleet = await serve(stack, day, pools)
            report(f"  {fleet.in_time:.1%} in time, {fleet.worker_hours:.3f} worker-hours")
            return fleet

        following = await serve_pools("")
        bar = min(HOLDS, following.in_time)
        fixed = await try_smaller_fleets(_largest_shape(following.counts), serve_pools, bar)
    return DayComparison(day=day, following=following, fixed=fixed)


def targets(day: Day) -> ScalingSettings:
    """Return the settings of `trivium up --autoscale`, with delays for so short a day."""
    return ScalingSettings(
        ttft_ms=day.ttft_ms,
        tpot_ms=day.tpot_ms,
        start_ms=int(day.start_ms),
        workers_max=day.workers_max,
        **PATIENCE,
    )


async def try_smaller_fleets(
    largest: ClusterShape, serve_one: Callable[[str], Awaitable[FleetResult]], bar: float
) -> list[FleetResult]:
    """Try the largest fleet, then fewer prefill and fewer decode workers while that holds.

    A fleet holds if its share in time is at least `bar`. If the largest one does not, no smaller
    one is tried.
    """
    fleets = [await serve_one(largest.name)]
    if fleets[0].in_time < bar:
        return fleets
    for kind in ("prefill", "decode"):
        while getattr(largest, kind) > 1:
            smaller = replace(largest, **{kind: getattr(largest, kind) - 1})
            fleets.append(await serve_one(smaller.name))
            if fleets[-1].in_time < bar:
                break
            largest = smaller
    return fleets


def _largest_shape(counts: Counts) -> ClusterShape:
    peaks = {role: max(workers.get(role, 0) for _, workers in counts) for role in Role}
    return ClusterShape(prefill=peaks[Role.PREFILL], decode=peaks[Role.DECODE])


def _load() -> str:
    return " ".join(f"{value:.1f}" for value in os.getloadavg())


async def serve(stack: Stack, day: Day, pools: str) -> FleetResult:
    """Serve the day's requests with a stack; its pools are autoscaled if `pools` is empty."""
    counts: Counts = []
    async with stack, _run_beside(_count(stack, counts)):
        if pools:
            turns = await _ask_all(stack, day)
        else:
            async with _run_beside(Autoscaler(stack).run()):
                turns = await _ask_all(stack, day)
    times_ms = [(turn.ttft_ms, turn.tpot_ms) for turn in turns if turn is not None]
    return fleet_of(day, pools, counts, times_ms, len(turns))


@asynccontextmanager
async def _run_beside(work: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _count(stack: Stack, counts: Counts) -> None:
    """Count workers by role, starting and draining ones too, from when the stack is ready."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while True:
        workers: dict[Role, int] = {}
        members = stack.fleet.view.members if stack.fleet else {}
        for name, kind in stack.plan.names().items():
            process = stack.processes.get(name)
            if kind is not MemberKind.WORKER or process is None or not process.pid:
                continue
            role, member = Role(name.rpartition("-")[0]), members.get(name)
            if member is not None and member.registration.pid == process.pid:
                role = next(iter(member.registration.roles), role)
            workers[role] = workers.get(role, 0) + 1
        counts.append((READY_MS + 1_000 * (loop.time() - began_s), workers))
        await asyncio.sleep(LOOK_S)


async def _ask_all(stack: Stack, day: Day) -> list[LiveTurn | None]:
    """Send each request when it is due; return None for each one that failed."""
    load = LiveLoad(turns=1, tokens=day.answer_tokens, words=day.prompt_tokens, seed=day.seed)
    model, loop = stack.settings.model.served_name, asyncio.get_running_loop()
    began_s = loop.time()
    limits = httpx.Limits(max_connections=None)
    url = stack.gateway_urls[0]
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def ask(name: str, at_ms: float) -> LiveTurn | None:
            await asyncio.sleep(at_ms / 1_000 - (loop.time() - began_s))
            with contextlib.suppress(httpx.HTTPError, RuntimeError):
                (turn,) = await converse(client, model, load, name, name)
                return turn
            return None

        calls = [ask(request.session_id, request.at_ms - READY_MS) for request in day.requests()]
        answers = await asyncio.gather(*calls)
        await asyncio.sleep(max(0.0, day.day_ms * day.days / 1_000 - (loop.time() - began_s)))
        return answers
