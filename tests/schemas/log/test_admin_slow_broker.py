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
from schemas.log.admin import create_topics, describe_topics, expected_topics
from schemas.log.retry import retry_until
from schemas.settings import LogSettings
from tests.virtual import virtual
from tests.waiting import pass_time

SETTINGS = LogSettings(request_timeout_ms=5_000)
_TIMED_OUT, _COPIES, _DENIED = 7, 38, 29  # Kafka's codes


class SlowBroker:
    """As an admin client meets it: each kind of answer fails as often as is said."""

    def __init__(self, **failing: Callable[[], Any]) -> None:
        self.failing = failing
        self.topics: dict[str, int] = {}
        self.led = True
        self.asked: list[int] = []  # for coordinators, by kind

    def __call__(self, **_: object) -> "SlowBroker":
        return self

    async def find_coordinator(self, name: str, kind: int) -> int:
        """As a new cluster answers."""
        self.asked.append(kind)
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
            found = self.failing.pop(kind)()
            if isinstance(found, BaseException):
                raise found
            return found
        return None


def answering(broker: SlowBroker) -> Any:
    return patch("schemas.log.admin.AIOKafkaAdminClient", broker)


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
async def test_a_slow_broker_is_told_and_asked_again(case: str) -> None:
    """Each of these ended a start with a bare error."""
    failing, message = SLOW[case]
    broker = SlowBroker(**failing)
    told: list[str] = []
    with answering(broker):
        await retry_until(lambda: create_topics(SETTINGS), told.append, within_s=20)
        assert all(row.fits for row in await describe_topics(SETTINGS))
    assert re.search(message, told[0])
    assert told[1:] == [""]


@virtual
async def test_topics_without_leaders_are_named_in_the_end() -> None:
    """What is still missing, however long it was asked for."""
    broker = SlowBroker()
    with answering(broker):
        await create_topics(SETTINGS)
        made = list(expected_topics(SETTINGS))
        assert list(broker.topics) == made
        broker.led = False
        named = f"find leaders for {made[0]}, .*asked for 21 s"
        with pytest.raises(BrokerUnavailable, match=named):
            await retry_until(lambda: create_topics(SETTINGS), lambda _: None, within_s=21)


@virtual
async def test_what_the_broker_refuses_for_good_is_not_asked_again() -> None:
    broker = SlowBroker(create=lambda: _DENIED)
    told: list[str] = []
    with answering(broker), pytest.raises(TopicError, match=for_code(_DENIED).__name__):
        await retry_until(lambda: create_topics(SETTINGS), told.append, within_s=20)
    assert told == [""]


@virtual
async def test_a_bound_ends_also_what_never_answers() -> None:
    async def silent() -> None:
        await pass_time(1_000)
        raise NodeNotReadyError

    with pytest.raises(BrokerUnavailable, match="no answer .asked for 20 s"):
        await retry_until(silent, lambda _: None, within_s=20)


@virtual
async def test_a_new_cluster_is_asked_for_coordinators_and_one_that_has_our_topics_is_not() -> None:
    """So that it makes its own topics meanwhile."""
    broker = SlowBroker()
    with patch("schemas.log.admin.AIOKafkaAdminClient", broker):
        await create_topics(SETTINGS)
        await create_topics(SETTINGS)
    assert broker.asked == [0, 1]
