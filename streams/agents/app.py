"""The routers' consumer group: its name, its topics and its Faust app.

Called by `streams/agents/lifecycle.py`.
"""

from typing import Any

from schemas.settings import LogSettings
from streams.log.faust import app as faust_app
from streams.log.faust.app import EventHandler, RebalanceListener

TOPICS = ("requests", "cancellations", "phases", "outcomes")


def group_id(log: LogSettings) -> str:
    """Return the name of the routers' consumer group."""
    return f"{log.topic_prefix}router"


def marks_group(log: LogSettings) -> str:
    """Return the group under which `keep_marks` commits; it has no members."""
    return f"{log.topic_prefix}router.live"


def make_app(
    log: LogSettings, router_id: str, handler: EventHandler, partitions: RebalanceListener
) -> Any:
    """Return a Faust app that passes records to `handler`, and rebalances to `partitions`."""
    app = faust_app.make_app(log, group=group_id(log), member_id=router_id)
    faust_app.add_agents(app, log.topic_prefix, "router", TOPICS, handler)
    faust_app.follow_rebalances(app, log.topic_prefix, partitions)
    return app
