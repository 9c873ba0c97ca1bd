"""The routers' Faust app: its agents, its settings, and what is changed in Faust itself."""

from typing import Any

import pytest
from aiokafka.coordinator.assignors.range import RangePartitionAssignor

from schemas.errors import ConfigError
from schemas.log.faust import app as faust_app
from schemas.settings import LogSettings
from streams.agents.app import TOPICS, add_agents, make_app
from tests.streams.agents.fakes import (
    LOG,
)
from tests.waiting import run


def test_each_agent_hands_its_events_to_the_process() -> None:
    async def main() -> None:
        taken: list[tuple[str, bytes]] = []

        class Process:
            async def take(self, topic: str, event: Any) -> None:
                taken.append((topic, event.value))

        app = make_app(LOG, "router-a")
        for topic, agent in zip(TOPICS, add_agents(app, "test.", Process()), strict=True):
            async with agent.test_context() as context:
                await context.put(b"garbage-" + topic.encode())
        assert taken == [(topic, b"garbage-" + topic.encode()) for topic in TOPICS]

    run(main())


async def settings_of(log: LogSettings) -> Any:
    """Faust makes an event loop of its own where none runs."""
    return make_app(log, "router-a").conf


def test_the_app_has_no_web_server_and_never_commits_ahead() -> None:
    conf = run(settings_of(LOG))
    assert conf.id == "test.router"
    assert conf.web_enabled is False
    assert conf.stream_buffer_maxsize == 4_096
    assert conf.consumer_group_instance_id == "router-a"
    assert conf.topic_allow_declare is False


def test_another_faust_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faust_app, "version", lambda name: "9.9.9")
    with pytest.raises(ConfigError, match=r"expected faust-streaming 0\.15\.3, found 9\.9\.9"):
        run(settings_of(LOG))


def test_the_consumer_is_changed_as_meant() -> None:
    async def main() -> None:
        app = make_app(LOG, "router-a")
        thread = app.consumer._thread
        worker = thread._create_worker_consumer(app.transport)
        assert worker._fetch_max_wait_ms == faust_app.FETCH_MAX_WAIT_MS
        assert worker._partition_assignment_strategy == (RangePartitionAssignor,)
        await worker.stop()

    run(main())


def test_security_settings_reach_faust() -> None:
    sasl = LogSettings(
        security_protocol="SASL_SSL",
        sasl_mechanism="SCRAM-SHA-512",
        sasl_username="u",
        sasl_password="p",
    )
    credentials = run(settings_of(sasl)).broker_credentials
    assert str(credentials.mechanism.value) == "SCRAM-SHA-512"
    tls = LogSettings(security_protocol="SSL")
    assert run(settings_of(tls)).broker_credentials is not None
