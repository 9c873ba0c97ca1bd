"""A gateway that is gone for good: its work ends, but for what its clients read elsewhere."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from infra.bench.faults.expected_answers import alone
from infra.bench.faults.log_audit import audit, read_topic
from schemas.records import Heartbeat, Outcome, OutcomeKind
from schemas.rules.outcomes import counting
from schemas.settings import LogSettings
from tests.e2e.harness import Answer, Client, sim_settings, stack
from tests.waiting import until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(600)]

TOKENS = 1_500
STEP_MS = 30.0  # so 45 s: much longer than a lease and the grace
GRACE_MS = 8_000
LEFT = 4


async def running_on(log: LogSettings, worker_id: str) -> int:
    """How many requests it has, as it last said."""
    beats = [b for b in await read_topic(log, "fleet") if isinstance(b, Heartbeat)]
    return next(b.load.running for b in reversed(beats) if b.member_id == worker_id)


async def ends(log: LogSettings) -> dict[str, Outcome]:
    """The outcome that counts of each request that has ended."""
    found: dict[str, list[Outcome]] = {}
    for outcome in await read_topic(log, "outcomes"):
        found.setdefault(outcome.request_id, []).append(outcome)
    return {name: end for name, each in found.items() if (end := counting(each)) is not None}


@dataclass
class Reading:
    """What clients of one gateway read when it dies."""

    url: str
    model: str
    seen: list[Answer] = field(default_factory=lambda: [Answer() for _ in range(2 + LEFT)])

    async def read(self) -> None:
        """One stream is to go on without its client, the others have a client that wants them."""
        async with Client(self.url, self.model) as keeper, Client(self.url, self.model) as client:
            keeper.http.headers["x-trivium-on-disconnect"] = "continue"
            streams = [
                (client if n else keeper).stream(f"Question {n}", into=answer, max_tokens=TOKENS)
                for n, answer in enumerate(self.seen)
            ]
            await asyncio.gather(*streams, return_exceptions=True)

    @property
    def underway(self) -> bool:
        return all(len(answer.token_ids) > 20 for answer in self.seen)

    @property
    def request_ids(self) -> list[str]:
        """Of the stream that goes on, the one that is resumed elsewhere, and those left."""
        return [answer.headers["x-request-id"] for answer in self.seen]


async def test_a_lost_gateways_work_ends_unless_somebody_reads_it(
    kafka_with: Callable[..., Awaitable[LogSettings]], tmp_path: Path
) -> None:
    """Its workers are free, what was resumed elsewhere or is to go on does, whether it comes back
    or not (issue 10, 13). Two are lost here: gateway-0 for good, gateway-1 starts again.
    """
    log, router = await kafka_with(gateway_partitions=4), {"gateway_grace_ms": GRACE_MS}
    settings = sim_settings(log, router=router, decode_step_ms=STEP_MS)
    model = settings.model.served_name
    async with (
        stack(settings, tmp_path, long_leases=False, replica=1, gateways=3) as running,
        Client(running.gateway_urls[2], model) as other,
    ):
        lost = [Reading(url, model) for url in running.gateway_urls[:2]]
        tasks = [asyncio.create_task(each.read()) for each in lost]
        await until(lambda: all(each.underway for each in lost))
        kept_ids, resumed_ids, *left = zip(*[each.request_ids for each in lost], strict=True)
        left_ids = {request_id for pair in left for request_id in pair}
        running.processes["gateway-0"].stopping = True
        for number in range(2):
            await running.kill(f"gateway-{number}")
        await asyncio.gather(*tasks)
        resumed = [
            asyncio.create_task(other.resume(request_id, each.seen[1].event_ids[-1]))
            for request_id, each in zip(resumed_ids, lost, strict=True)
        ]

        async def left_have_ended() -> bool:
            return left_ids <= set(await ends(log))

        await until(left_have_ended)
        found = await ends(log)
        assert not {*kept_ids, *resumed_ids} & set(found), "they would have ended anyway by now"
        for request_id in left_ids:
            assert found[request_id].kind is OutcomeKind.CANCELLED
            error = found[request_id].error
            assert error is not None and error.message == f"{request_id}: cancelled: gateway_lost"

        async def only_those_run() -> bool:
            return await running_on(log, "replica-0") == 4

        await until(only_those_run)
        rests = await asyncio.gather(*resumed)
        judged = await audit(log)
        wanted = [judged.requests[request_id] for request_id in resumed_ids]
        expected = await alone(running.settings, wanted)
        assert running.processes["gateway-1"].restarts == 1
    for request_id, each, rest in zip(resumed_ids, lost, rests, strict=True):
        assert rest.done
        assert each.seen[1].token_ids + rest.token_ids == expected[request_id].token_ids
    kinds = {request_id: counting(each) for request_id, each in judged.outcomes.items()}
    completed = {name for name, end in kinds.items() if end and end.kind is OutcomeKind.COMPLETED}
    assert completed == {*kept_ids, *resumed_ids}
    reasons = [d.reason for d in judged.of_kind("cancel")]
    assert reasons == ["gateway_lost"] * len(left_ids)
