"""Answers that search while they are generated, on a whole stack and a broker."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from infra.bench.faults.log_audit import wait_settled
from infra.handbook.library import TextDocument, library
from infra.story.record_finder import read_story
from schemas.settings import LogSettings
from tests.e2e.audits import decoder
from tests.e2e.harness import Answer, Client, sim_settings, stack
from tests.long_leases import BRIEF_LEASE_MS, LONG_LEASES
from tests.waits import PATIENCE_S, until
from tests.workers.llm.probing import own_triggers

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1_800)]

TOWN = "town"
PIERS = [
    TextDocument(f"pier-{n}", f"Pier number {n} of Ondry is kept by a man of age {40 + n}.")
    for n in range(9)
]
EVERY, PROBES = 24, 5
WISH: dict[str, Any] = {
    "collection": TOWN,
    "k": 1,
    "min_score": -1.0,
    "probes": {
        "every": EVERY,
        "lookahead": 8,
        "max": PROBES,
        "min_score": -1.0,
        "stall_ms": 60_000,
    },
}


def cited(answer: Answer) -> list[tuple[int, int, str]]:
    """Which probe put which passage before which token; 0: the search before the answer."""
    citations = answer.trivium["retrieval"]["citations"]
    return [
        (citation["probe"], citation["before_token"], citation["passage_id"])
        for citation in citations
    ]


async def test_answer_with_probes_continues_same_after_worker_kill(
    kafka_with: Callable[..., Awaitable[LogSettings]], tmp_path: Path
) -> None:
    """The other worker inserts the logged hits at the same places and probes for the rest."""
    gateway = {"ttft_ms": 120_000, "probe_tokens_max": 400}
    log = await kafka_with(asker_partitions=6)  # a router, both workers, and this test
    settings = sim_settings(log, gateway=gateway, decode_step_ms=15.0)
    model = settings.model.served_name
    async with (
        stack(
            *(settings, tmp_path / "home"),
            lease_ms=BRIEF_LEASE_MS,
            replica=2,
            retrieval=1,
            embedding=1,
        ) as running,
        library(log) as shelf,
        Client(running.gateway_urls[0], model) as client,
    ):
        await shelf.put(TOWN, PIERS)
        for pier in PIERS:
            await shelf.wait_for(TOWN, pier, PATIENCE_S)
        wish: dict[str, Any] = {"max_tokens": 400, "retrieval": WISH}
        question = "Who keeps pier number 3 of Ondry?"
        view = shelf.client.membership.view

        async def both_may_ask() -> bool:
            """Which a worker may from its first such answer on."""
            await asyncio.gather(*(client.stream(f"Who keeps {n}?", **wish) for n in range(4)))
            members = [view.members[f"replica-{n}"].registration for n in range(2)]
            return all("hits" in {lease.topic for lease in member.leases} for member in members)

        await until(both_may_ask)
        whole = await client.stream(question, **wish)
        assert not whole.error, whole.error
        places = [(probe, seq) for probe, seq, _ in cited(whole)]
        assert places == [(0, 0), *((n, n * EVERY) for n in range(1, PROBES + 1))]
        assert len({passage for *_, passage in cited(whole)}) == 1 + PROBES
        assert whole.usage["completion_tokens"] == len(whole.token_ids) == 400

        broken = Answer()
        asking = asyncio.create_task(client.stream(question, into=broken, **wish))
        await until(lambda: len(broken.token_ids) > 3 * EVERY)
        worker, _ = await decoder(log, broken.headers["x-request-id"])
        await running.kill(worker)
        await asking
        assert not broken.error and broken.is_done
        assert broken.trivium["decode_worker"] != worker
        assert (broken.token_ids, broken.text) == (whole.token_ids, whole.text)
        assert cited(broken) == cited(whole)
        for name in ("prompt_tokens", "completion_tokens"):
            assert broken.usage[name] == whole.usage[name]
        assert await wait_settled(log)
        story = await read_story(log, broken.headers["x-request-id"])
        assert story.outcome is not None and story.outcome.attempt == 2
        assert story.outcome.probes == PROBES


async def test_custom_trigger_requires_all_decode_workers(
    kafka_with: Callable[..., Awaitable[LogSettings]], tmp_path: Path
) -> None:
    """The name is refused until the worker that lacks the trigger has left."""
    site = {"PYTHONPATH": f"{own_triggers.install(tmp_path)}:{LONG_LEASES['PYTHONPATH']}"}
    settings = sim_settings(await kafka_with(asker_partitions=4))
    model = settings.model.served_name
    wish = {**WISH, "probes": {"trigger": own_triggers.NAME, "every": 1, "lookahead": 0}}
    async with (
        stack(
            settings, tmp_path / "home", env_by_process={"replica-0": site}, replica=2
        ) as running,
        Client(running.gateway_urls[0], model) as client,
    ):
        refused = await client.chat("Who keeps pier 3?", retrieval=wish)
        assert refused.error is not None and refused.status == 400
        assert "every, sentence, uncertain, found doubt" in refused.error["message"]
        assert "and some do" in refused.error["message"]
        await running.drain_worker("replica-1")

        async def asks() -> bool:
            answer = await client.stream("Who keeps pier 3?", max_tokens=400, retrieval=wish)
            return not answer.error and answer.trivium["probes"] > 0

        await until(asks)
