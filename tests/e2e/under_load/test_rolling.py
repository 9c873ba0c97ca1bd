"""Every process is restarted under load, and no request fails."""

import asyncio
import random
from pathlib import Path

import httpx
import pytest

from infra.bench.faults.conversations import ConversationLoad
from infra.bench.faults.http_clients import HUNG_UP, WHOLE, Balanced, ClientAnswer
from infra.bench.faults.log_audit import audit
from infra.bench.stacks import HOST, adjacent_ports
from infra.stack.rolling import restart
from schemas.settings import LogSettings
from tests.e2e.audits import answer_alone
from tests.e2e.harness import sim_settings, stack
from tests.waits import START_S

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(1_800)]


GRACE_MS = int(START_S * 1000)  # a stream that is only slow is not to be broken off


async def test_rolling_restart_fails_no_request(
    kafka: LogSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Balanced, "timeout", httpx.Timeout(None))  # this process may stall, too
    port, restarted, client_answers = adjacent_ports(2), list[str](), list[ClientAnswer]()
    gateway = {"port": port, "grace_ms": GRACE_MS}
    settings = sim_settings(kafka, gateway=gateway, decode_step_ms=10.0)
    async with stack(settings, tmp_path, replica=2, routers=2, gateways=2) as running:
        urls = [f"http://{HOST}:{port + number}" for number in range(2)]
        client = Balanced(urls, settings.model.served_name, random.Random(1))
        load = ConversationLoad(
            client, rate=6.0, seed=1, on_answer=client_answers.append, retrieves=0.0
        )
        asking = asyncio.create_task(load.run())
        await restart(
            (),
            folder=tmp_path,
            process_timeout_s=START_S,
            on_restart=lambda name, _: restarted.append(name),
        )
        load.is_over = True
        await asking
        assert await load.drain(START_S) == 0
        log_audit = await audit(kafka)
        expected = await answer_alone(running.settings, log_audit.requests.values())
    assert set(restarted) == set(running.plan.names())
    assert [answer for answer in client_answers if answer.status not in (WHOLE, HUNG_UP)] == []
    whole = [answer for answer in client_answers if answer.status == WHOLE]
    assert len(whole) > 30
    assert all(answer.token_ids == expected[answer.request_id].token_ids for answer in whole)
