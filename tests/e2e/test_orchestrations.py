"""The three orchestrations through whole stacks of simulated engines, over real NIXL."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from infra.bench.faults.log_audit import audit
from infra.stack.launcher import Stack
from schemas.records import Orchestration, OutcomeKind, PhaseKind
from tests.conftest import _fresh_topics
from tests.e2e.audits import answer_alone
from tests.e2e.harness import Answer, Client, client_of, sim_settings, stack

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1_800)]
REMOTE = {"policy": "static", "local_share": 0.0, "local_after_ms": 600_000}
DEGREES = {"prefill-0": 2, "decode-0": 1, "decode-1": 4}


def openings(orchestration: str) -> list[str]:
    """Prompts of which no worker has KV: those of other tests begin otherwise."""
    return [f"{orchestration}, part {n}: " + "logs and streams " * 20 for n in range(6)]


@pytest.fixture(scope="module")
async def pair(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Two workers, for whatever order a call wishes."""
    settings = sim_settings(await _fresh_topics(bootstrap), router=REMOTE)
    folder = tmp_path_factory.mktemp("pair")
    async with stack(settings, folder, prefill=1, decode=1) as running:
        yield running


@pytest.fixture(scope="module")
async def unlike(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Workers whose degrees of tensor parallelism differ, one way and the other."""
    router = {**REMOTE, "orchestration": "decode_first"}
    settings = sim_settings(await _fresh_topics(bootstrap), router=router)
    env_by_process = {
        name: {"TRIVIUM_SIM_TENSOR_PARALLEL": str(degree)} for name, degree in DEGREES.items()
    }
    folder = tmp_path_factory.mktemp("unlike")
    async with stack(
        settings, folder, prefill=1, decode=2, env_by_process=env_by_process
    ) as running:
        yield running


async def conversation(client: Client, opening: str) -> list[Answer]:
    """Two turns, the second of which extends the first."""
    first = await client.stream(opening)
    messages = [
        {"role": "user", "content": opening},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And then?"},
    ]
    return [first, await client.stream("", messages=messages)]


async def test_kv_transfer_transposes_between_tensor_parallel_degrees(unlike: Stack) -> None:
    async with client_of(unlike) as client:
        turns = await asyncio.gather(
            *(conversation(client, opening) for opening in openings("degrees"))
        )
    log_audit = await audit(unlike.settings.log)
    expected = await answer_alone(unlike.settings, log_audit.requests.values())
    members = unlike._fleet.view.members if unlike._fleet is not None else {}
    degrees = {
        name: member.registration.capability.tensor_parallel
        for name, member in members.items()
        if member.registration.capability is not None
    }
    assert degrees == DEGREES
    answers = [answer for turn in turns for answer in turn]
    assert log_audit.kinds() == {OutcomeKind.COMPLETED.value: len(answers)}
    assert {answer.trivium["decode_worker"] for answer in answers} == {"decode-0", "decode-1"}
    for answer in answers:
        assert answer.token_ids == expected[answer.headers["x-request-id"]].token_ids
        assert answer.trivium["kv_bytes"] > 0
        assert answer.trivium["attempt"] == 1
    orders = {outcome.orchestration for (outcome,) in log_audit.outcomes.values()}
    assert orders == {Orchestration.DECODE_FIRST}, "as `router.orchestration` says"


@pytest.mark.parametrize("orchestration", ["prefill_first", "decode_first", "concurrent"])
async def test_orchestration_returns_tokens_of_single_engine(
    pair: Stack, orchestration: str
) -> None:
    async with client_of(pair) as client:
        client.http.headers["x-trivium-orchestration"] = orchestration
        turns = await asyncio.gather(
            *(conversation(client, opening) for opening in openings(orchestration))
        )
        short_answer = await client.stream("Say one word.", max_tokens=1)
    answers = [*(answer for turn in turns for answer in turn), short_answer]
    names = [answer.headers["x-request-id"] for answer in answers]
    log_audit = await audit(pair.settings.log)
    expected = await answer_alone(pair.settings, [log_audit.requests[name] for name in names])
    for name, answer in zip(names, answers, strict=True):
        assert log_audit.outcomes[name][0].kind is OutcomeKind.COMPLETED
        assert answer.token_ids == expected[name].token_ids
    ways = {log_audit.outcomes[name][0].orchestration for name in names[:-1]}
    assert ways == {Orchestration(orchestration)}
    assert answers[0].headers["x-trivium-prefill-worker"] == "prefill-0"
    for first, second in turns:  # what decode holds of the first turn is not sent again
        assert 0 < second.trivium["kv_bytes"] < first.trivium["kv_bytes"]
    finished_prefills = [
        phase
        for name in names
        for phase in log_audit.phases.get(name, ())
        if phase.kind is PhaseKind.PREFILL_DONE
    ]
    paired = orchestration != "prefill_first"
    assert any(phase.kv is None and phase.kv_bytes for phase in finished_prefills) is paired


async def test_gateway_honours_or_refuses_requested_policy(pair: Stack) -> None:
    """The gateway knows the workers from the log."""
    async with client_of(pair) as client:
        refused = await client.chat("a", trivium={"policy": "replica"})
        assert refused.error is not None and refused.status == 400
        assert "replica needs a worker for replica" in refused.error["message"]
        met = await client.stream("in pairs", trivium={"policy": "pairs"})
    name = met.headers["x-request-id"]
    log_audit = await audit(pair.settings.log)
    assert {decision.policy for decision in log_audit.decisions[name]} == {"pairs"}
