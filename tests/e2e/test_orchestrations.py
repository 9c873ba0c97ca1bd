"""The three orchestrations through whole stacks of simulated engines, over real NIXL."""

import asyncio
from pathlib import Path

import pytest

from infra.bench.faults.expected_answers import alone
from infra.bench.faults.log_audit import audit
from schemas.records import Orchestration, OutcomeKind, PhaseKind
from schemas.settings import LogSettings
from tests.e2e.harness import Answer, Client, sim_settings, stack

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1_800)]
OPENINGS = [f"Tell me about logs, part {n}: " + "logs and streams " * 20 for n in range(6)]


async def conversation(client: Client, opening: str) -> list[Answer]:
    """Two turns, the second of which extends the first."""
    first = await client.stream(opening)
    messages = [
        {"role": "user", "content": opening},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And then?"},
    ]
    return [first, await client.stream("", messages=messages)]


@pytest.mark.parametrize(("prefill", "decode"), [(4, 1), (2, 4)])
async def test_degrees_of_tensor_parallelism_may_differ(
    kafka: LogSettings, tmp_path: Path, prefill: int, decode: int
) -> None:
    """KV is transposed on its way, both ways (issue 10, 27)."""
    remote = {"policy": "static", "local_share": 0.0, "local_after_ms": 600_000}
    settings = sim_settings(kafka, router={**remote, "orchestration": "decode_first"})
    variable = "TRIVIUM_SIM_TENSOR_PARALLEL"
    own = {"prefill-0": {variable: str(prefill)}, "decode-0": {variable: str(decode)}}
    async with (
        stack(settings, tmp_path, prefill=1, decode=1, own=own) as running,
        Client(running.gateway_urls[0], settings.model.served_name) as client,
    ):
        turns = await asyncio.gather(*(conversation(client, opening) for opening in OPENINGS[:2]))
        found = await audit(kafka)
        expected = await alone(running.settings, found.requests.values())
        members = running._fleet.view.members if running._fleet is not None else {}
        degrees = {
            name: member.registration.capability.tensor_parallel
            for name, member in members.items()
            if member.registration.capability is not None
        }
    assert degrees == {"prefill-0": prefill, "decode-0": decode}
    answers = [answer for pair in turns for answer in pair]
    assert found.kinds() == {OutcomeKind.COMPLETED.value: len(answers)}
    for answer in answers:
        assert answer.token_ids == expected[answer.headers["x-request-id"]].token_ids
        assert answer.trivium["kv_bytes"] > 0
        assert answer.trivium["attempt"] == 1


@pytest.mark.parametrize("orchestration", ["prefill_first", "decode_first", "concurrent"])
async def test_an_orchestration_gives_the_tokens_of_an_engine_alone(
    kafka: LogSettings, tmp_path: Path, orchestration: str
) -> None:
    remote = {"policy": "static", "local_share": 0.0, "local_after_ms": 600_000}
    settings = sim_settings(kafka, router={**remote, "orchestration": orchestration})
    async with (
        stack(settings, tmp_path, prefill=1, decode=1) as running,
        Client(running.gateway_urls[0], settings.model.served_name) as client,
    ):
        turns = await asyncio.gather(*(conversation(client, opening) for opening in OPENINGS))
        one = await client.stream("Say one word.", max_tokens=1)
        found = await audit(kafka)
        expected = await alone(running.settings, found.requests.values())
    answers = [*(answer for pair in turns for answer in pair), one]
    assert found.kinds() == {OutcomeKind.COMPLETED.value: len(answers)}
    for answer in answers:
        assert answer.token_ids == expected[answer.headers["x-request-id"]].token_ids
    ways = {
        found.outcomes[answer.headers["x-request-id"]][0].orchestration for answer in answers[:-1]
    }
    assert ways == {Orchestration(orchestration)}
    assert answers[0].headers["x-trivium-prefill-worker"] == "prefill-0"
    for first, second in turns:  # what decode holds of the first turn is not sent again
        assert 0 < second.trivium["kv_bytes"] < first.trivium["kv_bytes"]
    done = [
        phase
        for phases in found.phases.values()
        for phase in phases
        if phase.kind is PhaseKind.PREFILL_DONE
    ]
    paired = orchestration != "prefill_first"
    assert any(phase.kv is None and phase.kv_bytes for phase in done) is paired
