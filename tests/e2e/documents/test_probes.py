"""Answers that search while they are generated, on a whole stack and a broker (issue 12, 3)."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from infra.handbook.library import Text, library
from schemas.settings import LogSettings
from tests.e2e.audits import decoder
from tests.e2e.harness import Answer, Client, sim_settings, stack
from tests.waiting import until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(600)]

TOWN = "town"
PIERS = [
    Text(f"pier-{n}", f"Pier number {n} of Ondry is kept by a man of age {40 + n}.")
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
    return [(each["probe"], each["before_token"], each["passage_id"]) for each in citations]


async def test_an_answer_with_probes_goes_on_the_same_when_its_worker_is_killed(
    kafka: LogSettings, tmp_path: Path
) -> None:
    """The other worker puts in what the log has, at the same places, and asks for the rest."""
    gateway = {"ttft_ms": 120_000, "probe_tokens_max": 400}
    settings = sim_settings(kafka, gateway=gateway, decode_step_ms=15.0)
    name = settings.model.served_name
    async with (
        stack(
            *(settings, tmp_path / "home"),
            long_leases=False,
            replica=2,
            retrieval=1,
            embedding=1,
        ) as running,
        library(settings.log) as shelf,
        Client(running.gateway_urls[0], name) as client,
    ):
        await shelf.put(TOWN, PIERS)
        for each in PIERS:
            await shelf.wait_for(TOWN, each, 120)
        wish: dict[str, Any] = {"max_tokens": 400, "retrieval": WISH}
        question = "Who keeps pier number 3 of Ondry?"
        whole = await client.stream(question, **wish)
        assert not whole.error, whole.error
        places = [(probe, seq) for probe, seq, _ in cited(whole)]
        assert places == [(0, 0), *((n, n * EVERY) for n in range(1, PROBES + 1))]
        assert len({passage for *_, passage in cited(whole)}) == 1 + PROBES
        assert whole.usage["completion_tokens"] == len(whole.token_ids) == 400

        broken = Answer()
        asking = asyncio.create_task(client.stream(question, into=broken, **wish))
        await until(lambda: len(broken.token_ids) > 3 * EVERY)
        worker, _ = await decoder(settings.log, broken.headers["x-request-id"])
        await running.kill(worker)
        await asking
        assert not broken.error and broken.done
        assert broken.trivium["decode_worker"] != worker
        assert (broken.token_ids, broken.text) == (whole.token_ids, whole.text)
        assert cited(broken) == cited(whole)
        assert broken.usage == whole.usage
