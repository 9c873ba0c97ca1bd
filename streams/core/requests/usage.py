"""What a request has used, as its end tells it: one `Usage` each, however it ended.

The counts are those that its client is told: of the outcome that counts, with what was looked up
for the prompt. The time is what workers have told of: of each step that they handed over or failed,
of attempts that were given up, too, and of the end. One worker may do several. What a lost worker
has spent nobody knows. Pure; the number is its writer's to give (`streams/agents/usage.py`).
"""

from schemas.records import Outcome, Usage
from streams.core.requests.live import LiveRequest

UNNUMBERED = -1


def usage_of(live: LiveRequest, outcome: Outcome) -> Usage:
    """What a request has used that ended so."""
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
