"""Creates the topics of the table and checks that those on the broker fit it. Called by the CLI, by
routers and gateways at their start, and by tests.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, NodeNotReadyError, for_code

from schemas.errors import BrokerUnavailable, ConfigError, TopicError
from schemas.log.connecting import client_options, no_broker, started
from schemas.rules.sizes import RECORD_BYTES_MAX
from schemas.settings import LogSettings
from schemas.topics import DEAD_LETTER_SUFFIX, HOUR_MS, REBUILT_FROM, TOPICS, Topic

log = logging.getLogger("trivium.log")
_UNKNOWN_TOPIC = 3
_ALREADY_EXISTS = 36
_FENCED = "currently fenced"  # of brokers that starve, in what Kafka says of copies
_NAMED = 4  # of what is missing; the others are counted
Needs = Mapping[str, tuple[str, int]]  # topic, and which setting has what is on it live how long


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicStatus:
    """A topic as the table wants it and as the broker has it; `found` is 0 where it is missing."""

    name: str
    expected: int
    found: int
    records: str
    cleanup: str
    retention_ms: int

    @property
    def fits(self) -> bool:
        return self.expected == self.found


def wanted_topics(settings: LogSettings) -> dict[str, NewTopic]:
    """Every topic with its dead letters, by full name."""
    wanted: dict[str, NewTopic] = {}
    for topic in TOPICS.values():
        full = settings.topic_prefix + topic.name
        wanted[full] = _new(full, settings.partitions(topic.group), settings, _config(topic))
        dead = full + DEAD_LETTER_SUFFIX
        wanted[dead] = _new(dead, 1, settings, {"retention.ms": str(topic.retention_ms)})
    return wanted


def _config(topic: Topic) -> dict[str, str]:
    config = {"cleanup.policy": topic.cleanup, **topic.config}
    if "delete" in topic.cleanup:
        config["retention.ms"] = str(topic.retention_ms)
    return config


def _new(name: str, partitions: int, settings: LogSettings, config: dict[str, str]) -> NewTopic:
    config = {"max.message.bytes": str(RECORD_BYTES_MAX), **config}
    if settings.replication_factor > 1:
        config["min.insync.replicas"] = str(settings.copies_min)
    return NewTopic(
        name=name,
        num_partitions=partitions,
        replication_factor=settings.replication_factor,
        topic_configs=config,
    )


async def _admin(settings: LogSettings) -> AIOKafkaAdminClient:
    client = AIOKafkaAdminClient(**client_options(settings), client_id="trivium-admin")
    try:
        await started(client.start, client.close)
    except KafkaError as error:
        raise no_broker(settings.bootstrap, error) from error
    return client


async def create_topics(settings: LogSettings) -> list[str]:
    """Create what is missing, check what is there; returns the names created. Safe to repeat.

    Raises TopicError where an existing topic has another partition count or one is refused, and
    BrokerUnavailable, naming what is missing, where the broker is too slow for now.
    """
    wanted = wanted_topics(settings)
    client = await _admin(settings)
    made: list[str] = []
    try:
        with _in_time(settings, "say which topics it has"):
            counts = await _partition_counts(client, wanted)
        missing = [name for name in wanted if name not in counts]
        if missing:
            with _in_time(settings, f"create {_some(missing)}"):
                made = await _create(client, [wanted[name] for name in missing], settings)
            counts = await _all_counts(client, wanted, settings)
    finally:
        await client.close()
    _check_counts(_rows(settings, counts))
    return made


async def _create(
    client: AIOKafkaAdminClient, topics: list[NewTopic], settings: LogSettings
) -> list[str]:
    """The names that were not there."""
    try:
        response = await client.create_topics(topics, timeout_ms=settings.request_timeout_ms)
    except AttributeError as error:  # aiokafka 0.14, where the brokers name no controller
        raise NodeNotReadyError("no controller is known") from error
    made = []
    for name, code, *rest in response.topic_errors:
        if code not in (0, _ALREADY_EXISTS):
            refusal = for_code(code)
            why = f"{refusal.__name__} {rest}"
            if refusal.retriable or _FENCED in why:
                raise refusal(why)
            raise TopicError(f"{name}: not created: {why}")
        made += [name] * (code == 0)
    return made


async def _all_counts(
    client: AIOKafkaAdminClient, wanted: Iterable[str], settings: LogSettings
) -> dict[str, int]:
    """Wait until every topic has leaders: metadata follows the controller's answer."""
    missing = list(wanted)
    try:
        async with asyncio.timeout(settings.request_timeout_ms / 1000):
            while True:  # there is no event to wait for
                counts = await _partition_counts(client, wanted)
                if not (missing := [name for name in wanted if name not in counts]):
                    return counts
                await asyncio.sleep(0.02)
    except (KafkaError, TimeoutError) as error:
        raise _too_slow(settings, f"find leaders for {_some(missing)}", error) from error


@contextmanager
def _in_time(settings: LogSettings, what: str) -> Iterator[None]:
    try:
        yield
    except (KafkaError, TimeoutError) as error:
        raise _too_slow(settings, what, error) from error


def _too_slow(settings: LogSettings, what: str, error: BaseException) -> BrokerUnavailable:
    why = str(error) or type(error).__name__
    return BrokerUnavailable(
        f"the broker at {settings.bootstrap} did not {what}: {why}; try again, or give it longer "
        f"than log.request_timeout_ms={settings.request_timeout_ms}"
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)
    return ", ".join(names[:_NAMED]) + more


async def _partition_counts(client: AIOKafkaAdminClient, names: Iterable[str]) -> dict[str, int]:
    described = await client.describe_topics(list(names))
    return {
        topic["topic"]: len(topic["partitions"])
        for topic in described
        if not topic["error_code"] and all(p["leader"] >= 0 for p in topic["partitions"])
    }


async def describe_topics(settings: LogSettings) -> list[TopicStatus]:
    """Every wanted topic beside what the broker has."""
    client = await _admin(settings)
    try:
        with _in_time(settings, "say which topics it has"):
            counts = await _partition_counts(client, wanted_topics(settings))
    finally:
        await client.close()
    return _rows(settings, counts)


def _rows(settings: LogSettings, counts: Mapping[str, int]) -> list[TopicStatus]:
    rows = []
    for name, topic in wanted_topics(settings).items():
        own = name.removeprefix(settings.topic_prefix)
        table = TOPICS[own.removesuffix(DEAD_LETTER_SUFFIX)]
        rows.append(
            TopicStatus(
                name=name,
                expected=topic.num_partitions,
                found=counts.get(name, 0),
                records=", ".join(table.records) if own in TOPICS else "dead letters",
                cleanup=topic.topic_configs.get("cleanup.policy", "delete"),
                retention_ms=table.retention_ms,
            )
        )
    return rows


async def verify_topics(settings: LogSettings) -> None:
    """Raise TopicError, saying what to do, unless every topic is there with its partition count."""
    _check_counts(await describe_topics(settings))


def _check_counts(rows: Sequence[TopicStatus]) -> None:
    missing = [row.name for row in rows if row.found == 0]
    if missing:
        raise TopicError(f"missing: {', '.join(missing)}; create them with `trivium topics create`")
    wrong = [row for row in rows if not row.fits]
    if wrong:
        found = "; ".join(f"{r.name}: expected {r.expected}, found {r.found}" for r in wrong)
        raise TopicError(
            f"partition counts differ: {found}. They decide which router owns a session and are "
            "never changed in place: set them in [log] to what is there, or choose another "
            "topic_prefix, or drain and delete the topics"
        )


def needs_of_requests(deadline_ms_max: int) -> dict[str, tuple[str, int]]:
    """Where a request has to be found for as long as it may live."""
    return dict.fromkeys((*REBUILT_FROM, "tokens"), ("gateway.deadline_ms_max", deadline_ms_max))


async def check_retention(settings: LogSettings, needs: Needs) -> None:
    """Raise ConfigError unless the broker keeps each topic an hour longer than what is on it lives.

    What the broker does not tell is only logged: it may not be asked by everybody.
    """
    asked = [
        ConfigResource(
            ConfigResourceType.TOPIC,
            settings.topic_prefix + name,
            dict.fromkeys(("cleanup.policy", "retention.ms"), ""),
        )
        for name in needs
    ]
    client = await _admin(settings)
    try:
        with _in_time(settings, "say how long it keeps topics"):
            responses = await client.describe_configs(asked)
    finally:
        await client.close()
    for response in responses:
        for code, _, _, topic, entries in response.resources:
            if code not in (0, _UNKNOWN_TOPIC):  # what is missing, others say
                why = for_code(code).__name__
                log.warning("%s: its retention is not known, and not checked: %s", topic, why)
                continue
            config = {name: value for name, value, *_ in entries}
            _check_kept(topic, config, *needs[topic.removeprefix(settings.topic_prefix)])


def _check_kept(topic: str, config: Mapping[str, str], setting: str, lives_ms: int) -> None:
    kept_ms, least_ms = int(config.get("retention.ms", -1)), lives_ms + HOUR_MS
    if "delete" in config.get("cleanup.policy", "") and 0 <= kept_ms < least_ms:
        raise ConfigError(
            f"{topic}: expected retention.ms of at least {least_ms}, an hour more than "
            f"{setting}={lives_ms}, found {kept_ms}: what lives would be lost; raise the topic's "
            f"retention.ms with Kafka's tools, or lower {setting}"
        )
