"""Measures how soon workers are free, and answers as frequent, after many clients disconnect.

Runs the storm twice. First without other load: heartbeats show when each worker has no request and
no KV left. They come twice a second, so a figure is up to half a second late. Then clients in a
closed loop ask before, during and after the storm, and their answers are counted.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from infra.bench.faults.http_clients import WHOLE, ClientAnswer
from infra.bench.results import Bar, at_least, at_most, percentiles
from infra.bench.vllm.streams import NAME, StreamClient, draw_prompt
from infra.stack.launcher import Stack
from schemas.records import Cancellation, MemberKind, Outcome, OutcomeKind
from streams.log.clock import wall_ms

LOOPS, LOOP_TOKENS, LOOP_WORDS = 8, 16, 12
STORM_TOKENS, STORM_WORDS = 400, 12
HELD_S = 4.0  # from the calls until all clients disconnect
BEFORE_S, AFTER_S, BIN_S, BACK_S = 20.0, 30.0, 5.0, 10.0
FREE_S, RATE_SHARE = 1.0, 0.9
_FREE_LIMIT_S, _PATIENCE_S, _LOOK_S = 120.0, 300.0, 0.01


@dataclass(slots=True)
class Storm:
    """One abort storm and its results. `_s` times are monotonic, `_ms` times are wall time."""

    hung_up_s: float = 0.0  # when the first connection was closed
    hung_up_ms: int = 0
    closing_s: float = 0.0  # duration of closing all connections
    streaming: int = 0  # calls that had a token by then
    slots: dict[str, int] = field(default_factory=dict)  # requests by worker, just before
    free_s: dict[str, float | None] = field(default_factory=dict)  # until it has no request
    kv_free_s: dict[str, float | None] = field(default_factory=dict)  # until it has no KV either

    def figures(
        self, outcomes: Sequence[Outcome], cancellations: Sequence[Cancellation]
    ) -> dict[str, Any]:
        """Return the figures, with the log's records of its requests."""
        cancelled = [o.ended_ms - self.hung_up_ms for o in outcomes]
        request_ids = {o.request_id for o in outcomes}
        noticed = [c.at_ms - self.hung_up_ms for c in cancellations if c.request_id in request_ids]
        return {
            "streaming": self.streaming,
            "closing_s": round(self.closing_s, 3),
            "slots_before": self.slots,
            "free_s": self.free_s,
            "kv_free_s": self.kv_free_s,
            "cancelled_on_the_log": len(cancelled),
            "noticed_ms": percentiles(noticed, (50, 99, 100)),
            "outcome_ms": percentiles(cancelled, (50, 99, 100)),
        }


async def storm(
    stack: Stack, url: str, model: str, prompts: Sequence[str], *, is_alone: bool
) -> Storm:
    """Send all prompts at once, disconnect all clients after `HELD_S`, and return the results."""
    asker, result = StreamClient(url, model), Storm()
    answers = [ClientAnswer(client=NAME) for _ in prompts]
    asking = [
        asyncio.create_task(asker.stream(prompt, STORM_TOKENS, into=answer))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    await asyncio.sleep(HELD_S)
    result.slots = {name: count for name, (count, _) in worker_loads(stack).items()}
    result.streaming = sum(bool(answer.token_ids) for answer in answers)
    beats = beat_numbers(stack)
    result.hung_up_s, result.hung_up_ms = time.monotonic(), wall_ms()
    await asker.hang_up()
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    result.closing_s = time.monotonic() - result.hung_up_s
    if is_alone:
        await wait_freed(stack, beats, result)
    return result


def worker_loads(stack: Stack) -> dict[str, tuple[int, int]]:
    """Return the numbers of requests and KV blocks that each worker reported last."""
    assert stack.fleet is not None
    return {
        name: (member.load.running + member.load.waiting, member.load.kv_blocks_used)
        for name, member in stack.fleet.view.members.items()
        if member.registration.kind is MemberKind.WORKER
    }


def beat_numbers(stack: Stack) -> dict[str, int]:
    """Return the number of each member's last heartbeat."""
    assert stack.fleet is not None
    return {name: member.beat_seq for name, member in stack.fleet.view.members.items()}


async def wait_freed(stack: Stack, beats: dict[str, int], result: Storm) -> None:
    """Record when a new heartbeat of each worker reports no request, and when no KV blocks."""
    result.free_s, result.kv_free_s = dict.fromkeys(result.slots), dict.fromkeys(result.slots)
    while None in result.kv_free_s.values():
        passed_s = round(time.monotonic() - result.hung_up_s, 2)
        if passed_s > _FREE_LIMIT_S:
            return
        now = beat_numbers(stack)
        for name, (requests, blocks) in worker_loads(stack).items():
            if now[name] == beats.get(name):
                continue
            if result.free_s.get(name) is None and not requests:
                result.free_s[name] = passed_s
            if result.kv_free_s.get(name) is None and not requests + blocks:
                result.kv_free_s[name] = passed_s
        await asyncio.sleep(_LOOK_S)


@dataclass(slots=True)
class Loop:
    """Clients that each ask one short question after the other until `over`."""

    asker: StreamClient
    words: Sequence[str]
    seed: str
    ended_s: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    over: bool = False

    async def run(self) -> None:
        """Run all clients of the closed loop until `over` is set."""
        await asyncio.gather(*(self._client(number) for number in range(LOOPS)))

    async def _client(self, number: int) -> None:
        rng = random.Random(f"{self.seed} loop {number}")
        while not self.over:
            answer = await self.asker.stream(draw_prompt(rng, self.words, LOOP_WORDS), LOOP_TOKENS)
            if answer.status == WHOLE:
                self.ended_s.append(time.monotonic())
            else:
                self.failed.append(answer.detail or answer.status)
                await asyncio.sleep(1)

    def rate(self, begin_s: float, end_s: float) -> float:
        """Return whole answers per second between two moments."""
        return sum(begin_s <= time_s < end_s for time_s in self.ended_s) / (end_s - begin_s)


def recovery(loop: Loop, before: tuple[float, float], hung_up_s: float) -> dict[str, Any]:
    """Return the rates before and after, and the end of the first bin with enough answers."""
    usual = loop.rate(*before)
    edges = [hung_up_s + BIN_S * number for number in range(int(AFTER_S / BIN_S) + 1)]
    bins = [
        loop.rate(begin, end) / usual if usual else 0.0
        for begin, end in zip(edges, edges[1:], strict=False)
    ]
    back = next((n for n, share in enumerate(bins) if share >= RATE_SHARE), None)
    later = loop.rate(hung_up_s + BACK_S, hung_up_s + AFTER_S)
    return {
        "answers_per_s_before": round(usual, 3),
        "share_by_bin": [round(share, 3) for share in bins],
        "back_s": None if back is None else (back + 1) * BIN_S,
        "share_later": round(later / usual, 3) if usual else None,
        "failed": loop.failed,
    }


async def rates(
    stack: Stack, url: str, model: str, words: Sequence[str], prompts: Sequence[str], seed: str
) -> tuple[Storm, dict[str, Any]]:
    """Run a storm beside clients in a closed loop; return it, and how the rate recovers."""
    loop = Loop(StreamClient(url, model), words, seed)
    running = asyncio.create_task(loop.run())
    await asyncio.sleep(BIN_S)  # until the batch is full
    begin_s = time.monotonic()
    await asyncio.sleep(BEFORE_S)
    before = (begin_s, time.monotonic())
    result = await storm(stack, url, model, prompts, is_alone=False)
    await asyncio.sleep(result.hung_up_s + AFTER_S - time.monotonic())
    loop.over = True
    async with asyncio.timeout(_PATIENCE_S):
        await running
    await loop.asker.hang_up()
    return result, recovery(loop, before, result.hung_up_s)


def of_storm(outcomes: Sequence[Outcome], result: Storm, until_ms: int) -> list[Outcome]:
    """Return the outcomes of the requests that this storm cancelled."""
    return [
        outcome
        for outcome in outcomes
        if outcome.kind is OutcomeKind.CANCELLED
        and result.hung_up_ms <= outcome.ended_ms < until_ms
    ]


def bars(alone: dict[str, Any], rate: dict[str, Any]) -> list[Bar]:
    """Return bars on the time until slots are free and until the rate is back."""
    times = [*alone["free_s"].values()]
    slowest = None if None in times or not times else max(times)
    return [
        at_most("storm: slots of all workers free", slowest, FREE_S, "s"),
        at_most("storm: rate of answers back", rate["back_s"], BACK_S, "s"),
        at_least("storm: rate after that, of before", rate["share_later"], RATE_SHARE),
    ]
