"""Starts the search of a request before it is queued, and puts the result into its prompt.

A request is queued when its router reads a `Retrieved` in the log. The router's agent writes it,
with the passages or an error; this handler has it written if the search has no time, exceeds
`retrievals_max` or is late. The first one in the log counts for every reader, so a rebuilt prompt
equals the live one. A router that takes over a request without one searches again.

`streams/core/requests/context.py` builds the prompt. Called by `streams/core/router.py` and
`streams/core/handlers/attempts.py`.
"""

from collections.abc import Callable, Sequence

from schemas.errors import DeadlineExceeded, QueueFull, TriviumError
from schemas.records import Insert, Retrieval, Retrieved
from streams.core.effects import NotifyRetrieval, SkipRetrieval, StartRetrieval
from streams.core.requests.context import with_context
from streams.core.requests.live import LiveRequest
from streams.core.states import State
from streams.core.tables import RouterTables

_Warm = Callable[[LiveRequest, Sequence[Insert], int], None]


class Retrievals:
    """Takes requests from their arrival through a search to the queue, on the router's tables."""

    def __init__(self, tables: RouterTables, warm: _Warm) -> None:
        """Create the handler; `warm` may have a worker compute the beginning of a prompt."""
        self._tables = tables
        self._warm = warm

    def begin(self, live: LiveRequest, now_ms: int) -> None:
        """Start the search of a request, which ends by the time that the request names."""
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
        """Continue without a search that was not answered in time."""
        self._go_without(live, _late_error(live, now_ms), now_ms)

    def _go_without(self, live: LiveRequest, error: TriviumError, now_ms: int) -> None:
        """Write a `Retrieved` with the error; one that is already in the log counts instead."""
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
        """Put the retrieved passages into the prompt, and queue the request."""
        context = with_context(live.request, retrieved)
        self._tables.histories.remember(live.request, context.inserts, live.partition)
        live.take(context)
        self.tell(live)
        self._tables.enqueue(live, now_ms)

    def tell(self, live: LiveRequest) -> None:
        """Send the reader the notice of its prompt's passages, before any token."""
        if live.passages.notice is not None:
            self._tables.effects.append(
                NotifyRetrieval(live.passages.notice, live.request.gateway_partition)
            )
            live.passages.notice = None


def _retrieval_of(live: LiveRequest) -> Retrieval:
    retrieval = live.request.retrieval
    assert retrieval is not None, f"{live.request_id}: wants nothing to be found"
    return retrieval


def _late_error(live: LiveRequest, now_ms: int) -> DeadlineExceeded:
    late_ms = now_ms - _retrieval_of(live).by_ms
    return DeadlineExceeded(f"{live.request_id}: nothing was found in time, {late_ms} ms ago")
