"""Everything that a router does, as effects returned by `Router.apply`; the agents carry them out
in order.
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
    """Give work, or its cancellation, to the worker that leases the partition."""

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
    """Write the outcome of a request that no worker ends, and tell the gateway that streams it."""

    outcome: Outcome
    partition: int
    gateway_partition: int


@frozen_in_order
class RecordUsage:
    """Write what a request has used, once its outcome is in the log; the writer numbers it."""

    usage: Usage
    partition: int


@frozen_in_order
class SaveSession:
    """Remember a conversation; the last one written counts."""

    session: Session
    partition: int


@frozen_in_order
class DropSession:
    """Delete a session that was remembered."""

    tenant: str
    session_id: str
    partition: int


@frozen_in_order
class StartRetrieval:
    """Search for a request, and write down what was found; `history` goes into that record."""

    request: Request
    history: tuple[Insert, ...]
    partition: int


@frozen_in_order
class SkipRetrieval:
    """Write that a request goes on without its retrieval."""

    retrieved: Retrieved
    partition: int


@frozen_in_order
class NotifyRetrieval:
    """Send the gateway a notice of what was put into an answer's prompt."""

    retrieved: StreamRetrieved
    gateway_partition: int


@frozen_in_order
class RequestProgress:
    """Announce to an answer's readers that an attempt is void; they write what they have."""

    void: StreamVoid
    gateway_partition: int


@frozen_in_order
class RestartAnswer:
    """Write that an answer begins anew, since no reader wrote what it has."""

    continued: Continued
    partition: int


@frozen_in_order
class WarmCache:
    """Have a worker compute the beginning of a prompt; nothing waits for it."""

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
