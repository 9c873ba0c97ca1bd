"""Everything that a router does, as effects returned by `Router.apply`; the agents carry them out
in order. Tuples, because every placement makes two, and frozen dataclasses take twice as long.
"""

from typing import NamedTuple

from schemas.records import CancelWork, Decision, Outcome, Session, Work


class Dispatch(NamedTuple):
    """Give work, or its cancellation, to the worker that leases the partition."""

    topic: str
    partition: int
    record: Work | CancelWork


class Decide(NamedTuple):
    """Write a decision to its session's partition."""

    decision: Decision
    partition: int


class End(NamedTuple):
    """Write the outcome of a request that no worker ends, and tell the gateway that streams it."""

    outcome: Outcome
    partition: int
    gateway_partition: int


class SaveSession(NamedTuple):
    """Remember a conversation; the last one written counts."""

    session: Session
    partition: int


class Forget(NamedTuple):
    """A conversation is remembered no longer."""

    session_id: str
    partition: int


Effect = Dispatch | Decide | End | SaveSession | Forget
