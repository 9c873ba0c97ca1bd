"""Computes the beginning of a prompt before its rest is known, into the prefix cache.

A router sends a `WarmPrefix` while the retrieval pool searches for the rest. The engine gets a job
of one token whose output is dropped. No request waits for it, so it is not retried. Pure;
`workers/loops.py` calls it.
"""

from typing import Protocol

from schemas.records import Capability, Sampling, WarmPrefix, WorkPhase
from schemas.rules.tokens import token_array
from workers.llm.active_requests import ActiveRequests
from workers.llm.engine import EngineLoad, Job, Jobs

_ONE_TOKEN = Sampling(max_tokens=1, temperature=0.0)


class WarmableEngine(Jobs, Protocol):
    """The part of an engine that shows whether it is busy."""

    capability: Capability

    def load(self) -> EngineLoad:
        """Return the engine's current figures."""


def warm_prefix(
    order: WarmPrefix, engine: WarmableEngine, requests: ActiveRequests, now_ms: int
) -> None:
    """Compute the prefix, unless the worker drains, or has a queue or no free place."""
    load, running_max = engine.load(), engine.capability.running_max
    is_busy = (
        load.waiting
        or len(requests.prefill_gate)
        or max(load.running, len(requests)) >= running_max
    )
    if is_busy or requests.draining or not requests.is_addressed_here(order):
        return
    capability = engine.capability
    if order.deadline_ms <= now_ms or order.model != capability.model:
        return
    if order.adapter and order.adapter not in capability.adapters:
        return
    engine.add(
        Job(
            request_id=f"warm.{order.request_id}",
            phase=WorkPhase.DECODE,  # its KV is not kept for a peer
            prompt_tokens=token_array(order.prompt_tokens),
            sampling=_ONE_TOKEN,
            deadline_ms=order.deadline_ms,
            cache_scope=order.cache_scope,
            adapter=order.adapter,
        )
    )
