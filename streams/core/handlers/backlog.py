"""Builds the `Backlog` of a router's heartbeats: its queue, and the demand on workers.

Decides nothing. `infra/scaling` computes from it how many workers each pool needs.
"""

from schemas.records import Backlog
from streams.core.placement.estimates import Estimates
from streams.core.tables import RouterTables


def backlog(tables: RouterTables, estimates: Estimates, now_ms: int) -> Backlog:
    """Return the queue's figures and the demand on workers; change nothing."""
    waiting, requests, demand = tables.admission, tables.requests, tables.demand
    since_ms = min((requests.by_id[request_id].queued_ms for request_id in waiting), default=now_ms)
    step_ms, sharing_ms = estimates.decode.coefficients[:2]
    return Backlog(
        waiting=len(waiting),
        oldest_ms=max(0, now_ms - since_ms),
        slack_ms=waiting.slack_ms(now_ms),
        handing_over=len(requests.handovers),
        retrieving=requests.retrieving,
        requests_per_s=demand.queued.per_s(now_ms),
        prompt_tokens=demand.queued.mean("prompt_tokens"),
        answer_tokens=demand.answered.mean("answer_tokens"),
        prefill_ms=demand.placed.mean("prefill_ms"),
        append_ms=demand.placed.mean("append_ms"),
        step_ms=step_ms,
        sharing_ms=sharing_ms,
    )
