"""What a router applies: records and other happenings as events of the core, live and in replays.

`event_of` is what a record of a session partition means; `event_of_line` what a line of the journal
does (`streams/journal/journal.py`). Neither reads anything.
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
TICK, PASSED_OVER, STOPPED = "tick", "passed_over", "stopped"  # lines that are no record's
READ_BACK = ("requests", "cancellations", "phases", "decisions", "prefixes")  # what lines only name
TELLS_ID = ("usage", PASSED_OVER)  # lines that carry a request's id


def event_of(record: Any, partition: int) -> Event:
    """A record of a session partition."""
    event: Event = _EVENTS[type(record)](record, partition)
    return event


def event_of_line(topic: str, partition: int, offset: int, ahead_ms: int, content: Any) -> Event:
    """What a line was; `content` is its record, the request's id where only that was told, or
    nothing."""
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
