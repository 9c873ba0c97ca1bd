"""Where a consumer group begins that has read nothing yet: now, not at what nobody waits for."""

from collections.abc import Sequence

from aiokafka import TopicPartition
from aiokafka.errors import CommitFailedError, KafkaError, UnknownMemberIdError

from schemas.errors import BrokerUnavailable
from schemas.log.clock import wall_ms
from schemas.log.connecting import asking_client
from schemas.settings import LogSettings
from schemas.topics import TOPICS

_BACK_MS = 10_000  # what is asked just before the first worker comes still counts


async def begin_now(settings: LogSettings, group_id: str, topics: Sequence[str]) -> None:
    """Give a new group its offsets; one that has some keeps them. Raises BrokerUnavailable."""
    partitions = [
        TopicPartition(settings.topic_prefix + topic, partition)
        for topic in topics
        for partition in range(settings.partitions(TOPICS[topic].group))
    ]
    try:
        async with asking_client(settings, group_id) as consumer:
            consumer.assign(partitions)
            new = [each for each in partitions if await consumer.committed(each) is None]
            if new:
                recent = await consumer.offsets_for_times(dict.fromkeys(new, wall_ms() - _BACK_MS))
                ends = await consumer.end_offsets(new)
                await consumer.commit(
                    {each: found.offset if (found := recent[each]) else ends[each] for each in new}
                )
    except (CommitFailedError, UnknownMemberIdError):
        return  # another member was quicker, and reads already
    except KafkaError as error:
        raise BrokerUnavailable(f"{group_id}: no offsets: {error}") from error
