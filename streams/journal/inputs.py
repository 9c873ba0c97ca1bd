"""Converts a router's inputs to events of the core, live and in replays.

`event_of` converts a record of a session partition, `event_of_line` a line of the journal
(`streams/journal/journal.py`). Neither reads anything. Called by `streams/agents/partitions.py` and
`infra/replay`.
"""

from typing import Any

from schemas.records import (
    Cancellation,
    Continued,
    Decision,
    Outcome,
    Phase,
    Request,
    Resumption,
    Retrieved,
    Session,
    Usage,
)
from streams.core.events import (
    CancellationArrived,
    ContinuedArrived,
    DecisionLoaded,
    Event,
    FleetRecordArrived,
    KvEventsArrived,
    OutcomeArrived,
    PartitionLost,
    PartitionReady,
    PartitionTaken,
    PhaseArrived,
    RequestArrived,
    ResumptionArrived,
    RetrievedArrived,
    SessionLoaded,
    Tick,
    UsageLoaded,
)

_EVENTS: dict[type, Any] = {
    Request: RequestArrived,
    Cancellation: CancellationArrived,
    Resumption: ResumptionArrived,
    Phase: PhaseArrived,
    Retrieved: RetrievedArrived,
    Continued: ContinuedArrived,
    Outcome: OutcomeArrived,
    Decision: DecisionLoaded,
    Session: SessionLoaded,
    Usage: lambda usage, partition: UsageLoaded(usage.request_id, partition),
}
_OWNERSHIP: dict[str, Any] = {
    "taken": PartitionTaken,
    "ready": PartitionReady,
    "lost": PartitionLost,
}
TICK, PASSED_OVER, STOPPED = "tick", "passed_over", "stopped"  # lines without a record
READ_BACK = ("requests", "cancellations", "phases", "decisions", "prefixes")  # lines without values
TELLS_ID = ("usage", PASSED_OVER)  # lines that carry a request's id


def event_of(record: Any, partition: int) -> Event:
    """Return the event of a record of a session partition."""
    event: Event = _EVENTS[type(record)](record, partition)
    return event


def event_of_line(topic: str, partition: int, offset: int, ahead_ms: int, content: Any) -> Event:
    """Return the event of a journal line; `content` is its record, its request's id (usage), or
    None."""
    if topic == TICK:
        return Tick()
    if topic in _OWNERSHIP:
        event: Event = _OWNERSHIP[topic](partition)
        return event
    if topic in TELLS_ID:
        return UsageLoaded(content, partition)
    if topic == "fleet":
        return FleetRecordArrived(content, offset, ahead_ms)
    if topic == "prefixes":
        return KvEventsArrived(content, offset)
    return event_of(content, partition)
