"""The consumer group of the replicas of one shard."""

from schemas.log.faust.beginning import begin_now
from schemas.settings import LogSettings
from workers.search.service.intake import TOPICS
from workers.search.service.settings import ShardPlace


def group_id(log_settings: LogSettings, place: ShardPlace) -> str:
    """Its name."""
    return f"{log_settings.topic_prefix}retrieval-{place.shard}of{place.shards}"


async def begin(log_settings: LogSettings, place: ShardPlace) -> None:
    """Give a new group its offsets; one that has some keeps them. Raises BrokerUnavailable."""
    await begin_now(log_settings, group_id(log_settings, place), tuple(TOPICS))
