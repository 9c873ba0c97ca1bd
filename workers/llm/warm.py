"""Prompts' beginnings that are computed before the rest is known: lost is lost, and nobody waits.

A router has one computed while the rest is searched for. It goes to the engine as a job of one
token whose output nobody takes. Pure; `workers/loops.py` calls it.
"""

from typing import Protocol

from schemas.records import Capability, Sampling, WarmPrefix, WorkPhase
from schemas.rules.tokens import token_array
from workers.llm.active_requests import ActiveRequests
from workers.llm.engine import EngineLoad, Job, Jobs

_ONE_TOKEN = Sampling(max_tokens=1, temperature=0.0)


class WarmableEngine(Jobs, Protocol):
    """What of an engine says whether it has time."""

    capability: Capability

    def load(self) -> EngineLoad:
        """Return the engine's current figures."""


def warm_prefix(
    order: WarmPrefix, engine: WarmableEngine, requests: ActiveRequests, now_ms: int
) -> None:
    """Compute it, unless others would wait for that: where there is a queue, or a drain."""
    load, running_max = engine.load(), engine.capability.running_max
    is_busy = (
        load.waiting
        or len(requests.prefill_gate)
        or max(load.running, len(requests)) >= running_max
    )
    if is_busy or requests.draining or not requests.is_addressed_here(order):
        return
    if order.deadline_ms <= now_ms or order.model != engine.capability.model:
        return
    engine.add(
        Job(
            request_id=f"warm.{order.request_id}",
            phase=WorkPhase.DECODE,  # of which nothing is kept for a peer
            prompt_tokens=token_array(order.prompt_tokens),
            sampling=_ONE_TOKEN,
            deadline_ms=order.deadline_ms,
            cache_scope=order.cache_scope,
        )
    )
