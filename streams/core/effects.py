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
    """A conversation is remembered no longer."""

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
    """Write down that a request goes on without what it wanted to be found."""

    retrieved: Retrieved
    partition: int


@frozen_in_order
class NotifyRetrieval:
    """Tell the gateway that streams an answer what was put into its prompt."""

    retrieved: StreamRetrieved
    gateway_partition: int


@frozen_in_order
class RequestProgress:
    """Tell whoever reads an answer that an attempt is void, and have it say what it has."""

    void: StreamVoid
    gateway_partition: int


@frozen_in_order
class RestartAnswer:
    """Write down that an answer begins anew, because nobody has said what there is of it."""

    continued: Continued
    partition: int


@frozen_in_order
class WarmCache:
    """Have a worker compute a prompt's beginning; nobody hears what became of it."""

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
