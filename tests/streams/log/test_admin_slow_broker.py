"""Topics on a broker that is too slow: what a start says, and that it may ask again."""

import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from aiokafka.errors import (
    GroupCoordinatorNotAvailableError,
    NodeNotReadyError,
    RequestTimedOutError,
    for_code,
)

from schemas.errors import BrokerUnavailable, TopicError
from schemas.settings import LogSettings
from streams.log.admin import create_topics, describe_topics, expected_topics
from streams.log.retry import retry_until
from tests.virtual_time import virtual
from tests.waits import pass_time

SETTINGS = LogSettings(request_timeout_ms=5_000)
_TIMED_OUT, _COPIES, _DENIED = 7, 38, 29  # Kafka's codes


class SlowBroker:
    """Stands for an admin client; each kind of call in `failing` fails once."""

    def __init__(self, **failing: Callable[[], Any]) -> None:
        self.failing = failing
        self.topics: dict[str, int] = {}
        self.led = True
        self.coordinator_kinds: list[int] = []  # for coordinators, by kind

    def __call__(self, **_: object) -> "SlowBroker":
        return self

    async def find_coordinator(self, name: str, kind: int) -> int:
        """Raise what a new cluster answers."""
        self.coordinator_kinds.append(kind)
        raise GroupCoordinatorNotAvailableError(name)

    async def start(self) -> None:
        """Connected."""

    async def close(self) -> None:
        """Closed."""

    async def _send_request(self, question: Any) -> Any:
        """Of metadata; where that may make topics, a broker's own settings say how many partitions
        they get."""
        await self._fail("describe")
        if question._allow_auto_topic_creation is not False:
            self.topics |= {name: 1 for name in question._topics if name not in self.topics}
        leader = 1 if self.led else -1
        answer: Any = type("Answer", (), {})()
        topics = [
            {
                "topic": name,
                "error_code": 0 if name in self.topics else 3,
                "partitions": [{"leader": leader}] * self.topics.get(name, 0),
            }
            for name in question._topics
        ]
        answer.to_object = lambda: {"topics": topics}
        return answer

    async def create_topics(self, topics: list[Any], timeout_ms: int) -> Any:
        code = await self._fail("create") or 0
        if not code:
            self.topics |= {topic.name: topic.num_partitions for topic in topics}
        answer: Any = type("Answer", (), {})()
        why = "All brokers are currently fenced." if code == _COPIES else ""
        answer.topic_errors = [(topic.name, code, why) for topic in topics]
        return answer

    async def _fail(self, kind: str) -> Any:
        if kind in self.failing:
            outcome = self.failing.pop(kind)()
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome
        return None


def answering(broker: SlowBroker) -> Any:
    return patch("streams.log.admin.AIOKafkaAdminClient", broker)


SLOW: dict[str, tuple[dict[str, Callable[[], Any]], str]] = {
    "silent": (
        {"describe": RequestTimedOutError},
        "did not say which topics it has: .*RequestTimedOut",
    ),
    "creation": (
        {"create": TimeoutError},
        "did not create .*requests, .* and [0-9]+ more: TimeoutError",
    ),
    "creation refused for now": (
        {"create": lambda: _TIMED_OUT},
        "did not create .*requests, ",
    ),
    "fenced": ({"create": lambda: _COPIES}, "did not create .*currently fenced"),
    "no controller": (
        {"create": lambda: AttributeError("nodeId")},
        "did not create .*no controller is known",
    ),
}


@pytest.mark.parametrize("case", SLOW)
@virtual
async def test_topic_creation_reports_slow_broker_and_retries(case: str) -> None:
    """Each of these answers once ended a start with a bare error."""
    failing, message = SLOW[case]
    broker = SlowBroker(**failing)
    messages: list[str] = []
    with answering(broker):
        await retry_until(lambda: create_topics(SETTINGS), messages.append, within_s=20)
        assert all(row.fits for row in await describe_topics(SETTINGS))
    assert re.search(message, messages[0])
    assert messages[1:] == [""]


@virtual
async def test_topic_creation_error_names_topics_without_leaders() -> None:
    broker = SlowBroker()
    with answering(broker):
        await create_topics(SETTINGS)
        names = list(expected_topics(SETTINGS))
        assert list(broker.topics) == names
        broker.led = False
        message = f"find leaders for {names[0]}, .*asked for 21 s"
        with pytest.raises(BrokerUnavailable, match=message):
            await retry_until(lambda: create_topics(SETTINGS), lambda _: None, within_s=21)


@virtual
async def test_topic_creation_does_not_retry_final_refusal() -> None:
    broker = SlowBroker(create=lambda: _DENIED)
    messages: list[str] = []
    with answering(broker), pytest.raises(TopicError, match=for_code(_DENIED).__name__):
        await retry_until(lambda: create_topics(SETTINGS), messages.append, within_s=20)
    assert messages == [""]


@virtual
async def test_retry_raises_broker_unavailable_at_time_limit() -> None:
    async def silent() -> None:
        await pass_time(1_000)
        raise NodeNotReadyError

    with pytest.raises(BrokerUnavailable, match="no answer .asked for 20 s"):
        await retry_until(silent, lambda _: None, within_s=20)


@virtual
async def test_topic_creation_looks_up_coordinators_only_on_new_cluster() -> None:
    """The look-up has the new cluster create its own topics meanwhile."""
    broker = SlowBroker()
    with patch("streams.log.admin.AIOKafkaAdminClient", broker):
        await create_topics(SETTINGS)
        await create_topics(SETTINGS)
    assert broker.coordinator_kinds == [0, 1]
