"""Creates the topics of the table, and checks that the broker's topics fit it.

The command line and tests create topics; routers and gateways only check them at their start.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment as MemberAssignment
from aiokafka.errors import KafkaError, NodeNotReadyError, for_code
from aiokafka.protocol.metadata import MetadataRequest

from schemas.errors import BrokerUnavailable, ConfigError, TopicError
from schemas.rules.sizes import RECORD_BYTES_MAX
from schemas.settings import LogSettings
from schemas.topics import DEAD_LETTER_SUFFIX, HOUR_MS, REBUILT_FROM, TOPICS, Topic
from streams.log.connecting import client_options, no_broker, start_client

log = logging.getLogger("trivium.log")
_GROUPS, _TRANSACTIONS = 0, 1  # kinds of coordinators
_WAKE_S = 1.0
_UNKNOWN_TOPIC = 3
_ALREADY_EXISTS = 36
_FENCED = "currently fenced"  # in Kafka's error about replicas, while brokers are starved
_NAMES_SHOWN = 4  # missing names in a message; the others are counted
Needs = Mapping[str, tuple[str, int]]  # by topic: a setting's name, and how long it needs records


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicStatus:
    """A topic as the table needs it and as the broker has it; `found` is 0 if it is missing."""

    name: str
    expected: int
    found: int
    records: str
    cleanup: str
    retention_ms: int

    @property
    def fits(self) -> bool:
        return self.expected == self.found


def expected_topics(settings: LogSettings) -> dict[str, NewTopic]:
    """Return every topic and its dead-letter topic, by full name."""
    topics: dict[str, NewTopic] = {}
    for topic in TOPICS.values():
        full = settings.topic_prefix + topic.name
        topics[full] = _new(full, settings.partitions(topic.group), settings, _config(topic))
        dead = full + DEAD_LETTER_SUFFIX
        topics[dead] = _new(dead, 1, settings, {"retention.ms": str(topic.retention_ms)})
    return topics


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
        await start_client(client.start, client.close)
    except KafkaError as error:
        raise no_broker(settings.bootstrap, error) from error
    return client


async def create_topics(settings: LogSettings) -> list[str]:
    """Create missing topics, check existing ones; return the names created. Safe to repeat.

    Raises TopicError if an existing topic has another partition count or a new one is refused, and
    BrokerUnavailable, with the missing names, if the broker is too slow.
    """
    created_names, counts = await _create_missing(settings, expected_topics(settings))
    _check_counts(_rows(settings, counts))
    return created_names


async def create_extra_topics(
    settings: LogSettings, retentions: Mapping[str, int]
) -> dict[str, int]:
    """Create topics outside the table, given with their retentions in ms, and their dead-letter
    topics, if missing; return the partition count of each. Raises as `create_topics`, except about
    partition counts, which their owners choose.
    """
    topics = {}
    for name, retention_ms in retentions.items():
        config = {"retention.ms": str(retention_ms)}
        topics[name] = _new(name, settings.prompt_partitions, settings, config)
        dead = name + DEAD_LETTER_SUFFIX
        topics[dead] = _new(dead, 1, settings, config)
    return (await _create_missing(settings, topics))[1]


async def _create_missing(
    settings: LogSettings, topics: Mapping[str, NewTopic]
) -> tuple[list[str], dict[str, int]]:
    """Create missing topics; return the names created, and the partition count of each topic."""
    client = await _admin(settings)
    created_names: list[str] = []
    try:
        with _in_time(settings, "say which topics it has"):
            counts = await _partition_counts(client, topics)
        missing = [name for name in topics if name not in counts]
        if missing:
            await _wake_coordinators(client)
            with _in_time(settings, f"create {_first_names(missing)}"):
                created_names = await _create(client, [topics[name] for name in missing], settings)
            counts = await _all_counts(client, topics, settings)
    finally:
        await client.close()
    return created_names, counts


async def _wake_coordinators(client: AIOKafkaAdminClient) -> None:
    """Make a new cluster create its own topics, for groups and transactions, besides ours.

    Otherwise the first router's request would begin that, and wait for seconds. The answers do not
    matter: there may be no coordinator yet, or no permission, or the broker may be slow.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(_WAKE_S):
            lookups = (
                client.find_coordinator("trivium", kind) for kind in (_GROUPS, _TRANSACTIONS)
            )
            await asyncio.gather(*lookups, return_exceptions=True)


async def _create(
    client: AIOKafkaAdminClient, topics: list[NewTopic], settings: LogSettings
) -> list[str]:
    """Create topics; return the names that did not exist."""
    try:
        response = await client.create_topics(topics, timeout_ms=settings.request_timeout_ms)
    except AttributeError as error:  # aiokafka 0.14, if the brokers know no controller
        raise NodeNotReadyError("no controller is known") from error
    created_names = []
    for name, code, *rest in response.topic_errors:
        if code not in (0, _ALREADY_EXISTS):
            refusal = for_code(code)
            why = f"{refusal.__name__} {rest}"
            if refusal.retriable or _FENCED in why:
                raise refusal(why)
            raise TopicError(f"{name}: not created: {why}")
        created_names += [name] * (code == 0)
    return created_names


async def _all_counts(
    client: AIOKafkaAdminClient, names: Iterable[str], settings: LogSettings
) -> dict[str, int]:
    """Wait until every topic has leaders, and return the counts; metadata lag the controller."""
    missing = list(names)
    try:
        async with asyncio.timeout(settings.request_timeout_ms / 1000):
            while True:  # there is no event to wait for
                counts = await _partition_counts(client, names)
                if not (missing := [name for name in names if name not in counts]):
                    return counts
                await asyncio.sleep(0.02)
    except (KafkaError, TimeoutError) as error:
        raise _too_slow(settings, f"find leaders for {_first_names(missing)}", error) from error


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


def _first_names(names: Sequence[str]) -> str:
    suffix = f" and {len(names) - _NAMES_SHOWN} more" * (len(names) > _NAMES_SHOWN)
    return ", ".join(names[:_NAMES_SHOWN]) + suffix


async def _partition_counts(client: AIOKafkaAdminClient, names: Iterable[str]) -> dict[str, int]:
    """Return the counts of existing topics; the request must not create any, as some brokers do."""
    question = MetadataRequest(list(names), allow_auto_topic_creation=False)
    described = await client._send_request(question)  # noqa: SLF001  # the public one creates them
    return {
        topic["topic"]: len(topic["partitions"])
        for topic in described.to_object()["topics"]
        if not topic["error_code"] and all(p["leader"] >= 0 for p in topic["partitions"])
    }


async def partition_counts(settings: LogSettings, names: Iterable[str]) -> dict[str, int]:
    """Return the partition counts of those named topics that exist."""
    client = await _admin(settings)
    try:
        with _in_time(settings, "say which topics it has"):
            return await _partition_counts(client, names)
    finally:
        await client.close()


async def group_owners(settings: LogSettings, group_id: str) -> dict[tuple[str, int], str]:
    """Return which partitions of a consumer group each member has, by the client's name."""
    client = await _admin(settings)
    try:
        with _in_time(settings, f"say who is in the group {group_id}"):
            (answer,) = await client.describe_consumer_groups([group_id])
    finally:
        await client.close()
    return {
        (place.topic, place.partition): member["client_id"]
        for group in answer.to_object()["groups"]
        for member in group["members"]
        if member["member_assignment"]
        for place in MemberAssignment.decode(member["member_assignment"]).partitions()
    }


async def describe_topics(settings: LogSettings) -> list[TopicStatus]:
    """Return every expected topic with its state on the broker."""
    return _rows(settings, await partition_counts(settings, expected_topics(settings)))


def _rows(settings: LogSettings, counts: Mapping[str, int]) -> list[TopicStatus]:
    rows = []
    for name, topic in expected_topics(settings).items():
        base_name = name.removeprefix(settings.topic_prefix)
        table = TOPICS[base_name.removesuffix(DEAD_LETTER_SUFFIX)]
        rows.append(
            TopicStatus(
                name=name,
                expected=topic.num_partitions,
                found=counts.get(name, 0),
                records=", ".join(table.records) if base_name in TOPICS else "dead letters",
                cleanup=topic.topic_configs.get("cleanup.policy", "delete"),
                retention_ms=table.retention_ms,
            )
        )
    return rows


async def verify_topics(settings: LogSettings) -> None:
    """Raise TopicError, with a remedy, unless every topic exists with its partition count."""
    _check_counts(await describe_topics(settings))


def _check_counts(rows: Sequence[TopicStatus]) -> None:
    missing = [row.name for row in rows if row.found == 0]
    if missing:
        raise TopicError(f"missing: {', '.join(missing)}; create them with `trivium topics create`")
    wrong = [row for row in rows if not row.fits]
    if wrong:
        differences = "; ".join(f"{r.name}: expected {r.expected}, found {r.found}" for r in wrong)
        raise TopicError(
            f"partition counts differ: {differences}. They decide which router owns a session and "
            "are never changed in place: set them in [log] to what is there, or choose another "
            "topic_prefix, or drain and delete the topics"
        )


def needs_of_requests(deadline_ms_max: int) -> dict[str, tuple[str, int]]:
    """Return the needs of requests: topics that must keep a request's records while it lives."""
    return dict.fromkeys((*REBUILT_FROM, "tokens"), ("gateway.deadline_ms_max", deadline_ms_max))


async def check_retention(settings: LogSettings, needs: Needs) -> None:
    """Raise ConfigError unless the broker keeps each topic's records an hour longer than needed.

    A setting that the broker does not return is only logged: reading it may need a permission.
    """
    topics = {settings.topic_prefix + name: need for name, need in needs.items()}
    configs = await _configs(settings, topics, ("cleanup.policy", "retention.ms"))
    for topic, config in configs.items():
        _check_retention(topic, config, *topics[topic])


async def bytes_max_of(settings: LogSettings, topics: Iterable[str]) -> dict[str, int]:
    """Return the largest record that each topic accepts, at most what Trivium writes, in bytes."""
    name = "max.message.bytes"
    configs = await _configs(settings, topics, (name,))
    return {
        topic: min(RECORD_BYTES_MAX, int(configs.get(topic, {}).get(name, RECORD_BYTES_MAX)))
        for topic in topics
    }


async def _configs(
    settings: LogSettings, topics: Iterable[str], names: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Return these settings of the topics that exist and whose settings the broker returns."""
    resources = [
        ConfigResource(ConfigResourceType.TOPIC, topic, dict.fromkeys(names, ""))
        for topic in topics
    ]
    client = await _admin(settings)
    try:
        with _in_time(settings, f"say {' and '.join(names)} of topics"):
            responses = await client.describe_configs(resources)
    finally:
        await client.close()
    configs = {}
    for response in responses:
        for code, _, _, topic, entries in response.resources:
            if not code:
                configs[topic] = {name: value for name, value, *_ in entries}
            elif code != _UNKNOWN_TOPIC:  # other checks report missing topics
                why = for_code(code).__name__
                log.warning("%s: %s not told, and not checked: %s", topic, ", ".join(names), why)
    return configs


def _check_retention(topic: str, config: Mapping[str, str], setting: str, lives_ms: int) -> None:
    kept_ms, least_ms = int(config.get("retention.ms", -1)), lives_ms + HOUR_MS
    if "delete" in config.get("cleanup.policy", "") and 0 <= kept_ms < least_ms:
        raise ConfigError(
            f"{topic}: expected retention.ms of at least {least_ms}, an hour more than "
            f"{setting}={lives_ms}, found {kept_ms}: what lives would be lost; raise the topic's "
            f"retention.ms with Kafka's tools, or lower {setting}"
        )
