"""The effects that `Router.apply` returns: everything that a router does.

The agents (`streams/agents`) carry them out in order.
"""

from schemas.frozen import frozen_in_order
from schemas.records import (
    AssignRoles,
    CancelWork,
    Continued,
    Decision,
    Insert,
    Outcome,
    Request,
    Retrieved,
    Session,
    StreamRetrieved,
    StreamVoid,
    Usage,
    WarmPrefix,
    Work,
)


@frozen_in_order
class Dispatch:
    """Send work, or its cancellation, to the worker that leases the partition."""

    topic: str
    partition: int
    record: Work | CancelWork


@frozen_in_order
class Decide:
    """Write a decision to its session's partition."""

    decision: Decision
    partition: int


@frozen_in_order
class End:
    """Write the outcome of a request that no worker ends, and send it to the streaming gateway."""

    outcome: Outcome
    partition: int
    gateway_partition: int


@frozen_in_order
class RecordUsage:
    """Write the usage of a request once its outcome is in the log; the writer numbers it."""

    usage: Usage
    partition: int


@frozen_in_order
class SaveSession:
    """Write the state of a session; the last one written counts."""

    session: Session
    partition: int


@frozen_in_order
class DropSession:
    """Delete the stored state of a session."""

    tenant: str
    session_id: str
    partition: int


@frozen_in_order
class StartRetrieval:
    """Run a request's search and write the result; `history` goes into that record."""

    request: Request
    history: tuple[Insert, ...]
    partition: int


@frozen_in_order
class SkipRetrieval:
    """Write that a request continues without its retrieval."""

    retrieved: Retrieved
    partition: int


@frozen_in_order
class NotifyRetrieval:
    """Send the gateway a notice of the passages that were put into a prompt or an answer."""

    retrieved: StreamRetrieved
    gateway_partition: int


@frozen_in_order
class RequestProgress:
    """Send an answer's readers the notice that an attempt is void; they write what they have."""

    void: StreamVoid
    gateway_partition: int


@frozen_in_order
class RestartAnswer:
    """Write that an answer restarts from its beginning, because no reader wrote what it has."""

    continued: Continued
    partition: int


@frozen_in_order
class WarmCache:
    """Have a worker prefill the beginning of a prompt; nothing waits for the result."""

    topic: str
    partition: int
    record: WarmPrefix


@frozen_in_order
class LendRole:
    """Have a worker take over a role, or give it back."""

    topic: str
    partition: int
    record: AssignRoles


Effect = (
    Dispatch
    | Decide
    | End
    | RecordUsage
    | SaveSession
    | DropSession
    | StartRetrieval
    | SkipRetrieval
    | NotifyRetrieval
    | RequestProgress
    | RestartAnswer
    | WarmCache
    | LendRole
)
