"""Builds the `Usage` of an ended request: one for each request, however it ended.

The counts are those that its client gets: of the outcome that counts, and of the retrieval for the
prompt. The time is what workers reported: for each step that they handed over or failed, also of
void attempts, and for the end. One worker may report several. The time of a lost worker is unknown.
Pure; `streams/agents/usage.py` numbers the records as it writes them.
"""

from schemas.records import Outcome, Usage
from streams.core.requests.live import LiveRequest

UNNUMBERED = -1


def usage_of(live: LiveRequest, outcome: Outcome) -> Usage:
    """Return the usage of a request that ended with this outcome."""
    request = live.request
    return Usage(
        number=UNNUMBERED,
        request_id=request.request_id,
        parent_id=request.parent_id,
        choice=request.choice,
        session_id=request.session_id,
        tenant=request.tenant,
        priority=request.priority,
        endpoint=request.endpoint,
        model=request.model,
        kind=outcome.kind,
        attempt=outcome.attempt,
        prompt_tokens=outcome.prompt_tokens + outcome.retrieved_tokens,
        cached_tokens=outcome.cached_tokens,
        retrieved_tokens=live.retrieved_tokens + outcome.retrieved_tokens,
        completion_tokens=outcome.completion_tokens,
        worker_ms=sum(live.worked_ms.values()) + outcome.worker_ms,
        arrived_ms=request.arrived_ms,
        ended_ms=outcome.ended_ms,
    )
