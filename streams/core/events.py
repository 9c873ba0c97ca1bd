"""Everything that a router learns, as events for `Router.apply`.

`partition` is always the session partition. The agents make events from records and stamp the time;
recovery feeds the same events between `PartitionTaken` and `PartitionReady`, in which they rebuild
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
    """A request was given up."""

    cancellation: Cancellation
    partition: int


@frozen_in_order
class ResumptionArrived:
    """The answer of a request is read at another gateway too."""

    resumption: Resumption
    partition: int


@frozen_in_order
class PhaseArrived:
    """A worker finished a step, refused or failed."""

    phase: Phase
    partition: int


@frozen_in_order
class RetrievedArrived:
    """A router wrote down what was found for a request, or that nothing was."""

    retrieved: Retrieved
    partition: int


@frozen_in_order
class ContinuedArrived:
    """A gateway, or a router, wrote down how much there is of an answer."""

    continued: Continued
    partition: int


@frozen_in_order
class OutcomeArrived:
    """A worker, or a router, ended a request."""

    outcome: Outcome
    partition: int


@frozen_in_order
class FleetRecordArrived:
    """A member registered or beat; `ahead_ms` is its clock over the broker's, as measured."""

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
    """A remembered conversation, read while a partition is rebuilt."""

    session: Session
    partition: int


@frozen_in_order
class DecisionLoaded:
    """A past decision, of this router or of another, read while a partition is rebuilt."""

    decision: Decision
    partition: int


@frozen_in_order
class UsageLoaded:
    """What a request has used is written, or need not be, read while a partition is rebuilt."""

    request_id: str
    partition: int


@frozen_in_order
class PartitionTaken:
    """This router owns the partition from now on; its records follow."""

    partition: int


@frozen_in_order
class PartitionReady:
    """All that the log held of the partition has been applied."""

    partition: int


@frozen_in_order
class PartitionLost:
    """Another router may own the partition now."""

    partition: int


@frozen_in_order
class Tick:
    """Time has passed: deadlines and leases are to be looked at."""


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
