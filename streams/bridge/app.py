"""The bridges' consumer group: its name and its Faust app.

Faust assigns partitions and delivers records. Offsets are committed with the answers, in
transactions (`streams/bridge/partition_processor.py`), so no record is acknowledged to Faust.
"""

from collections.abc import Sequence
from typing import Any

from schemas.settings import LogSettings
from streams.log.faust import app as faust_app
from streams.log.faust.app import GroupMember

BUFFER_MAX = 64  # prompts that wait for their agent; further ones wait in Kafka


def group_id(log: LogSettings) -> str:
    """Return the name of the bridges' consumer group."""
    return f"{log.topic_prefix}bridge"


def make_app(log: LogSettings, bridge_id: str, topics: Sequence[str], owner: GroupMember) -> Any:
    """Make an app that passes records of these topics (full names) to `BridgePartitions`."""
    app = faust_app.make_app(
        log,
        group=group_id(log),
        member_id=bridge_id,
        buffer_max=BUFFER_MAX,
        leaves_group=True,
        reads_committed=True,
    )
    faust_app.add_agents(app, "", "bridge", topics, owner)
    faust_app.follow_rebalances(app, "", owner)
    return app
