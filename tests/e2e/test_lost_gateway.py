"""A gateway that is gone for good: its work ends, but for what its clients read elsewhere."""

import asyncio
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


@pytest.mark.parametrize("comes_back", [False, True])
async def test_a_lost_gateways_work_ends_unless_somebody_reads_it(
    kafka: LogSettings, tmp_path: Path, comes_back: bool
) -> None:
    """Its workers are free, what was resumed elsewhere or is to go on does (issue 10, 13)."""
    router = {"gateway_grace_ms": GRACE_MS}
    settings = sim_settings(kafka, router=router, decode_step_ms=STEP_MS)
    async with (
        stack(settings, tmp_path, long_leases=False, replica=1, gateways=2) as running,
        Client(running.gateway_urls[0], settings.model.served_name) as client,
        Client(running.gateway_urls[0], settings.model.served_name) as keeper,
        Client(running.gateway_urls[1], settings.model.served_name) as other,
    ):
        keeper.http.headers["x-trivium-on-disconnect"] = "continue"
        seen = [Answer() for _ in range(2 + LEFT)]
        tasks = [
            asyncio.create_task(
                (client if n else keeper).stream(f"Question {n}", into=answer, max_tokens=TOKENS)
            )
            for n, answer in enumerate(seen)
        ]
        await until(lambda: all(len(answer.token_ids) > 20 for answer in seen))
        ids = [answer.headers["x-request-id"] for answer in seen]
        kept_id, resumed_id, *left_ids = ids
        running.processes["gateway-0"].stopping = not comes_back
        await running.kill("gateway-0")
        await asyncio.gather(*tasks, return_exceptions=True)
        resumed = asyncio.create_task(other.resume(resumed_id, seen[1].event_ids[-1]))

        async def left_have_ended() -> bool:
            return set(left_ids) <= set(await ends(kafka))

        await until(left_have_ended)
        found = await ends(kafka)
        assert not {kept_id, resumed_id} & set(found), "they would have ended anyway by now"
        for request_id in left_ids:
            assert found[request_id].kind is OutcomeKind.CANCELLED
            error = found[request_id].error
            assert error is not None and error.message == f"{request_id}: cancelled: gateway_lost"

        async def only_those_run() -> bool:
            return await running_on(kafka, "replica-0") == 2

        await until(only_those_run)
        rest = await resumed
        judged = await audit(kafka)
        expected = await alone(running.settings, [judged.requests[resumed_id]])
    assert rest.done
    assert seen[1].token_ids + rest.token_ids == expected[resumed_id].token_ids
    kinds = {request_id: counting(each) for request_id, each in judged.outcomes.items()}
    completed = {name for name, end in kinds.items() if end and end.kind is OutcomeKind.COMPLETED}
    assert completed == {kept_id, resumed_id}
    reasons = [d.reason for d in judged.of_kind("cancel")]
    assert reasons == ["gateway_lost"] * LEFT
