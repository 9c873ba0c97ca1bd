"""The events that `Router.apply` takes: everything that a router reads.

`partition` is always the session partition. The agents make events from records and stamp the time;
recovery feeds the same events between `PartitionTaken` and `PartitionReady`, where they rebuild
state and have no effects.
"""

from schemas.frozen import frozen_in_order
from schemas.records import (
    Cancellation,
    Continued,
    Decision,
    Heartbeat,
    KvEvents,
    Outcome,
    Phase,
    Registration,
    Request,
    Resumption,
    Retrieved,
    Session,
)


@frozen_in_order
class RequestArrived:
    """A gateway accepted a request."""

    request: Request
    partition: int


@frozen_in_order
class CancellationArrived:
    """A client or its gateway cancelled a request."""

    cancellation: Cancellation
    partition: int


@frozen_in_order
class ResumptionArrived:
    """A client resumed the answer of a request, perhaps at another gateway."""

    resumption: Resumption
    partition: int


@frozen_in_order
class PhaseArrived:
    """A worker finished a step of an attempt, refused it or failed at it."""

    phase: Phase
    partition: int


@frozen_in_order
class RetrievedArrived:
    """A router or a worker wrote the result of a search for a request, or that there is none."""

    retrieved: Retrieved
    partition: int


@frozen_in_order
class ContinuedArrived:
    """A gateway or a router wrote how much of an answer its readers have."""

    continued: Continued
    partition: int


@frozen_in_order
class OutcomeArrived:
    """A worker or a router ended a request."""

    outcome: Outcome
    partition: int


@frozen_in_order
class FleetRecordArrived:
    """A member registered or sent a heartbeat; its clock is `ahead_ms` ahead of the broker's."""

    record: Registration | Heartbeat
    offset: int
    ahead_ms: int = 0


@frozen_in_order
class KvEventsArrived:
    """A worker's prefix cache changed."""

    record: KvEvents
    offset: int


@frozen_in_order
class SessionLoaded:
    """A stored session, read while a partition is rebuilt."""

    session: Session
    partition: int


@frozen_in_order
class DecisionLoaded:
    """A past decision, of this router or of another, read while a partition is rebuilt."""

    decision: Decision
    partition: int


@frozen_in_order
class UsageLoaded:
    """A request's usage is in the log or is not needed, as read while a partition is rebuilt."""

    request_id: str
    partition: int


@frozen_in_order
class PartitionTaken:
    """This router owns the partition from now on; the partition's records follow."""

    partition: int


@frozen_in_order
class PartitionReady:
    """All records of the partition in the log have been applied."""

    partition: int


@frozen_in_order
class PartitionLost:
    """Another router may own the partition now."""

    partition: int


@frozen_in_order
class Tick:
    """Time has passed: the router checks deadlines and leases."""


PartitionEvent = (
    RequestArrived
    | CancellationArrived
    | ResumptionArrived
    | PhaseArrived
    | RetrievedArrived
    | ContinuedArrived
    | OutcomeArrived
    | SessionLoaded
    | DecisionLoaded
    | UsageLoaded
    | PartitionTaken
    | PartitionReady
    | PartitionLost
)
Event = PartitionEvent | FleetRecordArrived | KvEventsArrived | Tick
