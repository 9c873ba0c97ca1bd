"""What is searched for a request before it is queued: asked for, put into its prompt, given up.

A request goes on when its router reads a `Retrieved` in the log, whoever wrote it: its agent with
what was found or why nothing was, or this handler where there is no time or no room for a search,
or the answer is late. Of several the first in the log counts, for every reader, so a rebuilt prompt
is the live one. A router that takes a request over of which the log has none asks again.

What the prompt then is, `streams/core/requests/context.py` says. Called by `streams/core/router.py`
and `streams/core/handlers/attempts.py`.
"""

from collections.abc import Callable, Sequence

from schemas.errors import DeadlineExceeded, QueueFull, TriviumError
from schemas.records import Insert, Retrieval, Retrieved
from streams.core.effects import NotifyRetrieval, SkipRetrieval, StartRetrieval
from streams.core.requests.context import with_context
from streams.core.requests.live import LiveRequest
from streams.core.states import State
from streams.core.tables import RouterTables

_Enqueue = Callable[[LiveRequest, int], None]
_Warm = Callable[[LiveRequest, Sequence[Insert], int], None]


class Retrievals:
    """The way of a request from its arrival to the queue, over the router's tables."""

    def __init__(self, tables: RouterTables, enqueue: _Enqueue, warm: _Warm) -> None:
        """`enqueue` is how a request goes on; `warm` may have a worker begin with its prompt."""
        self._tables = tables
        self._enqueue = enqueue
        self._warm = warm

    def begin(self, live: LiveRequest, now_ms: int) -> None:
        """Have it searched for a request, by the time that it names."""
        tables, retrieval = self._tables, _retrieval_of(live)
        is_full = tables.requests.retrieving >= tables.settings.retrievals_max
        tables.requests.move(live, State.RETRIEVING)
        if now_ms >= retrieval.by_ms:
            self._go_without(live, _late_error(live, now_ms), now_ms)
        elif is_full:
            limit = tables.settings.retrievals_max
            message = f"{live.request_id}: {limit} searches are under way (router.retrievals_max)"
            self._go_without(live, QueueFull(message), now_ms)
        else:
            history = tables.histories.inserts_of(live.request)
            tables.effects.append(StartRetrieval(live.request, history, live.partition))
            self._warm(live, history, now_ms)
            tables.requests.watch(live, retrieval.by_ms + tables.settings.retrieval_grace_ms)

    def handle_timeout(self, live: LiveRequest, now_ms: int) -> None:
        """Go on without a search that was not answered in time."""
        self._go_without(live, _late_error(live, now_ms), now_ms)

    def _go_without(self, live: LiveRequest, error: TriviumError, now_ms: int) -> None:
        """Have the log say so: what was written before counts all the same."""
        retrieved = Retrieved(
            request_id=live.request_id,
            session_id=live.request.session_id,
            router_id=self._tables.router_id,
            error=error.to_wire(),
            asked_ms=live.request.arrived_ms,
            at_ms=now_ms,
            history=self._tables.histories.inserts_of(live.request),
        )
        self._tables.effects.append(SkipRetrieval(retrieved, live.partition))

    def apply_retrieved(self, live: LiveRequest, retrieved: Retrieved, now_ms: int) -> None:
        """Put what was found into the prompt, and queue the request."""
        context = with_context(live.request, retrieved)
        self._tables.histories.remember(live.request, context.inserts, live.partition)
        live.take(context)
        self.tell(live)
        self._enqueue(live, now_ms)

    def tell(self, live: LiveRequest) -> None:
        """Notify the reader of what its prompt holds, before any token."""
        if live.notice is not None:
            self._tables.effects.append(
                NotifyRetrieval(live.notice, live.request.gateway_partition)
            )
            live.notice = None


def _retrieval_of(live: LiveRequest) -> Retrieval:
    retrieval = live.request.retrieval
    assert retrieval is not None, f"{live.request_id}: wants nothing to be found"
    return retrieval


def _late_error(live: LiveRequest, now_ms: int) -> DeadlineExceeded:
    late_ms = now_ms - _retrieval_of(live).by_ms
    return DeadlineExceeded(f"{live.request_id}: nothing was found in time, {late_ms} ms ago")
