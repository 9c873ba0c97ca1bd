"""The router's Faust app: its group and its four agents.

Each agent hands its events to `OwnedPartitions.take`.
"""

from typing import Any

from schemas.log.faust import app as faust_app
from schemas.log.faust.app import Taker
from schemas.settings import LogSettings

TOPICS = ("requests", "cancellations", "phases", "outcomes")


def group_id(log: LogSettings) -> str:
    """The routers' consumer group."""
    return f"{log.topic_prefix}router"


def make_app(log: LogSettings, router_id: str) -> Any:
    """An app with no agents yet; `add_agents` follows."""
    return faust_app.make_app(log, group=group_id(log), member_id=router_id)


def add_agents(app: Any, prefix: str, partitions: Taker) -> list[Any]:
    """One agent per topic; each hands its events to `partitions.take`."""
    return faust_app.add_agents(app, prefix, "router", TOPICS, partitions)
