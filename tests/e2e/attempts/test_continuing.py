"""Stacks whose workers die in the middle of answers: the next ones go on where those stopped."""

import asyncio
import signal
from collections import defaultdict
from pathlib import Path

import pytest

from infra.bench.faults.expected_answers import alone
from infra.bench.faults.log_audit import Audit, audit, read_topic
from schemas.records import Continued, Work
from schemas.settings import LogSettings
from tests.e2e.harness import Answer, Client, sim_settings, stack
from tests.long_leases import BRIEF_LEASE_MS
from tests.waiting import until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1_800)]

TOKENS = 1_600  # at 5 ms each: long enough to be caught in the middle
AT_LEAST = 100  # tokens that each answer has by then
SAMPLED = {"temperature": 0.8, "seed": 11}


def computed(found: Audit) -> dict[str, int]:
    """Tokens of each answer that stand in the log, those of several attempts counted each."""
    places: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for frame in found.frames:
        rows = zip(
            *(frame.request_ids, frame.attempts, frame.first_seqs, frame.token_counts), strict=True
        )
        for request_id, attempt, first, count in rows:
            places[request_id] |= {(attempt, place) for place in range(first, first + count)}
    return {request_id: len(each) for request_id, each in places.items()}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_answer_goes_on_where_its_worker_died(
    kafka: LogSettings, tmp_path: Path, how: signal.Signals
) -> None:
    """Greedy or sampled it is the same that nobody interrupts, and only the rest of it is computed
    (issue 14, 1)."""
    settings = sim_settings(kafka, decode_step_ms=5.0)
    async with (
        stack(settings, tmp_path, lease_ms=BRIEF_LEASE_MS, prefill=1, decode=2) as running,
        Client(running.gateway_urls[0], settings.model.served_name) as client,
    ):
        seen = [Answer() for _ in range(8)]
        tasks = [
            asyncio.create_task(
                client.stream(
                    f"Question {number}",
                    into=answer,
                    max_tokens=TOKENS,
                    **(SAMPLED if number % 2 else {}),
                )
            )
            for number, answer in enumerate(seen)
        ]
        await until(lambda: all(len(answer.token_ids) > AT_LEAST for answer in seen))
        await running.kill("decode-0", how)
        answers = await asyncio.gather(*tasks)
        if how is signal.SIGSTOP:
            await running.kill("decode-0", signal.SIGCONT)
        await client.stream("Who goes on?")
        found = await audit(kafka)
        expected = await alone(running.settings, found.requests.values())
        again = [w for w in await read_topic(kafka, "decode") if isinstance(w, Work) and w.said]
        told = [r for r in await read_topic(kafka, "phases") if isinstance(r, Continued)]
    for answer in answers:
        assert answer.done
        assert answer.token_ids == expected[answer.headers["x-request-id"]].token_ids
        assert answer.text == expected[answer.headers["x-request-id"]].text
    assert again and {work.request_id for work in again} == {each.request_id for each in told}
    assert all(work.attempt == 2 and work.said > AT_LEAST for work in again)
    drawn = computed(found)
    for work in again:  # decode draws prefill's token again, in either attempt
        assert drawn[work.request_id] < TOKENS + AT_LEAST / 2
    outcomes = [outcome for each in found.outcomes.values() for outcome in each]
    assert all(outcome.prompt_tokens < AT_LEAST for outcome in outcomes)
