"""Where a shard's consumer group begins: now, not at retrievals that nobody waits for."""

from aiokafka import TopicPartition
from aiokafka.errors import CommitFailedError, KafkaError, UnknownMemberIdError

from schemas.errors import BrokerUnavailable
from schemas.log.clock import wall_ms
from schemas.log.connecting import asking_client
from schemas.settings import LogSettings
from workers.search.service.intake import TOPICS
from workers.search.service.settings import ShardPlace

_BACK_MS = 10_000  # a retrieval that is asked just before the first worker comes still counts


def group_id(log_settings: LogSettings, place: ShardPlace) -> str:
    """The consumer group of the replicas of one shard."""
    return f"{log_settings.topic_prefix}retrieval-{place.shard}of{place.shards}"


async def begin(log_settings: LogSettings, place: ShardPlace) -> None:
    """Give a new group its offsets; one that has some keeps them. Raises BrokerUnavailable."""
    partitions = [
        TopicPartition(log_settings.topic_prefix + topic, partition)
        for topic in TOPICS
        for partition in range(log_settings.retrieval_partitions)
    ]
    try:
        async with asking_client(log_settings, group_id(log_settings, place)) as consumer:
            consumer.assign(partitions)
            new = [each for each in partitions if await consumer.committed(each) is None]
            if new:
                recent = await consumer.offsets_for_times(dict.fromkeys(new, wall_ms() - _BACK_MS))
                ends = await consumer.end_offsets(new)
                await consumer.commit(
                    {each: found.offset if (found := recent[each]) else ends[each] for each in new}
                )
    except (CommitFailedError, UnknownMemberIdError):
        return  # another replica was quicker, and reads already
    except KafkaError as error:
        raise BrokerUnavailable(f"{group_id(log_settings, place)}: no offsets: {error}") from error
