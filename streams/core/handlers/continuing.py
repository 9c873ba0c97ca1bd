"""Finds how much of an answer its readers have when its attempt is void, before the next attempt.

The router writes a mark on `tokens` that the attempt is void. The answer's readers deliver nothing
of the attempt behind the mark, and write what they had before it: a `Continued`. So all readers of
the log agree where the answer stops, and the next attempt continues there. A reader that still has
the answer's end, because it is in the log before the next attempt, writes that: the answer is
over. The request is queued when its router reads the first `Continued`, from any writer. If no
reader writes one in time, the router has an empty one written, and the answer restarts.
"""

from typing import Final

from schemas.records import Continued, StreamVoid
from schemas.rules.continuing import awaits_progress, prior_answer
from streams.core.effects import RequestProgress, RestartAnswer
from streams.core.requests.live import LiveRequest
from streams.core.states import State
from streams.core.tables import RouterTables

# For the progress of an answer's readers, many times the way through the log.
CONTINUE_WAIT_MS: Final = 1_000


class Continuing:
    """Takes requests from a void attempt back to the queue, on the router's tables."""

    def __init__(self, tables: RouterTables) -> None:
        self._tables = tables

    def begin(self, live: LiveRequest, now_ms: int) -> bool:
        """Ask the readers how much of the answer they have; return False if that is not needed."""
        tables = self._tables
        live.set_prior_answer(b"", 0)
        asks = awaits_progress(live.request, continues=tables.settings.continues)
        self.mark(live, live.attempt, asks=asks)
        if not asks:
            return False
        tables.requests.move(live, State.CONTINUING)
        live.progress_deadline_ms = now_ms + CONTINUE_WAIT_MS
        tables.requests.watch(live, live.progress_deadline_ms)
        return True

    def mark(self, live: LiveRequest, attempt: int, *, asks: bool = False) -> None:
        """Send the readers the notice that the attempt is void.

        A reader writes the attempt's end if it has it, or gets it before the next attempt begins.
        """
        void = StreamVoid(request_id=live.request_id, attempt=attempt, asks=asks)
        self._tables.effects.append(RequestProgress(void, live.request.gateway_partition))

    def handle_timeout(self, live: LiveRequest, now_ms: int) -> None:
        """Write that no reader has answered in time, so that the answer restarts."""
        if now_ms < live.progress_deadline_ms:
            return
        nothing = Continued(
            request_id=live.request_id,
            session_id=live.request.session_id,
            attempt=live.attempt,
            written_by=self._tables.router_id,
            at_ms=now_ms,
        )
        self._tables.effects.append(RestartAnswer(nothing, live.partition))

    def apply_continued(self, live: LiveRequest, continued: Continued) -> None:
        """End the request's prompt with the answer's tokens that its readers have."""
        live.set_prior_answer(*prior_answer(live.request, continued))
