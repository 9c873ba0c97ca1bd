"""Everything that a router does, as effects returned by `Router.apply`; the agents carry them out
in order.
"""

from dataclasses import dataclass

from schemas.records import CancelWork, Decision, Outcome, Session, Work


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Give work, or its cancellation, to the worker that leases the partition."""

    topic: str
    partition: int
    record: Work | CancelWork


@dataclass(frozen=True, slots=True)
class Decide:
    """Write a decision to its session's partition."""

    decision: Decision
    partition: int


@dataclass(frozen=True, slots=True)
class End:
    """Write the outcome of a request that no worker ends, and tell the gateway that streams it."""

    outcome: Outcome
    partition: int
    gateway_partition: int


@dataclass(frozen=True, slots=True)
class SaveSession:
    """Remember a conversation; the last one written counts."""

    session: Session
    partition: int


@dataclass(frozen=True, slots=True)
class Forget:
    """A conversation is remembered no longer."""

    session_id: str
    partition: int


Effect = Dispatch | Decide | End | SaveSession | Forget
