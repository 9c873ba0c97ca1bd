"""Sets where a new consumer group begins: now, because nobody waits for older records."""

from collections.abc import Sequence

from aiokafka import TopicPartition
from aiokafka.errors import CommitFailedError, KafkaError, UnknownMemberIdError

from schemas.errors import BrokerUnavailable
from schemas.settings import LogSettings
from schemas.topics import TOPICS
from streams.log.clock import wall_ms
from streams.log.connecting import query_client

_BACK_MS = 10_000  # so that requests just before the first worker's start still count


async def commit_start_offsets(settings: LogSettings, group_id: str, topics: Sequence[str]) -> None:
    """Commit a new group's first offsets; existing ones stay. Raise BrokerUnavailable."""
    partitions = [
        TopicPartition(settings.topic_prefix + topic, partition)
        for topic in topics
        for partition in range(settings.partitions(TOPICS[topic].group))
    ]
    try:
        async with query_client(settings, group_id) as consumer:
            consumer.assign(partitions)
            new = [
                partition for partition in partitions if await consumer.committed(partition) is None
            ]
            if new:
                recent = await consumer.offsets_for_times(dict.fromkeys(new, wall_ms() - _BACK_MS))
                ends = await consumer.end_offsets(new)
                await consumer.commit(
                    {
                        partition: start.offset if (start := recent[partition]) else ends[partition]
                        for partition in new
                    }
                )
    except (CommitFailedError, UnknownMemberIdError):
        return  # another member was faster, and reads already
    except KafkaError as error:
        raise BrokerUnavailable(f"{group_id}: no offsets: {error}") from error
