"""What there is of an answer whose attempt is void, before the request is placed again.

The router marks on `tokens` that the attempt is void. Whoever reads that answer delivers nothing of
the attempt behind the mark, and writes down what it had before: a `Continued`. So all readers of
the log agree how much there is, and the next attempt goes on right there. Whoever has the end all
the same, since it stands in the log before the next attempt, says that: the answer is over. A
request goes on when its router reads one, whoever wrote it: where no reader says anything in time,
the router has one written that says nothing, and the answer begins anew. Of several the first in
the log counts.
"""

from schemas.records import Continued, StreamVoid
from schemas.rules.continuing import awaits_progress, prior_answer
from streams.core.effects import RequestProgress, RestartAnswer
from streams.core.requests.live import LiveRequest
from streams.core.states import State
from streams.core.tables import RouterTables


class Continuing:
    """The way of a request from a void attempt back to the queue, over the router's tables."""

    def __init__(self, tables: RouterTables) -> None:
        self._tables = tables

    def begin(self, live: LiveRequest, now_ms: int) -> bool:
        """Have its readers say what they have; False where nobody needs to be asked."""
        tables = self._tables
        live.set_prior_answer(b"", 0)
        asks = awaits_progress(live.request, continues=tables.settings.continues)
        self.mark(live, live.attempt, asks=asks)
        if not asks:
            return False
        tables.requests.move(live, State.CONTINUING)
        live.progress_deadline_ms = now_ms + tables.settings.continue_wait_ms
        tables.requests.watch(live, live.progress_deadline_ms)
        return True

    def mark(self, live: LiveRequest, attempt: int, *, asks: bool = False) -> None:
        """Have its readers know that the attempt is void. Who has its end already says so, and who
        takes it before the next attempt begins.
        """
        void = StreamVoid(request_id=live.request_id, attempt=attempt, asks=asks)
        self._tables.effects.append(RequestProgress(void, live.request.gateway_partition))

    def handle_timeout(self, live: LiveRequest, now_ms: int) -> None:
        """Write that no reader has answered in time, so that the answer begins anew."""
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
        """End the request's prompt with the tokens that its readers have."""
        live.set_prior_answer(*prior_answer(live.request, continued))
