"""What placement learns from how requests went: turns phases and outcomes into observations.

Hosts' clocks differ, so every duration is measured by one of them: by a worker within a phase or an
answer, by this router from one record that it heard of to another. Pure functions; what is made of
an observation is `streams/core/placement/placer.py`'s.
"""

from schemas.records import Mode, Outcome, Phase
from streams.core.fleet.workers import Worker
from streams.core.placement.placer import Placer
from streams.core.requests.live import Live


def prefilled(placer: Placer, live: Live, phase: Phase, now_ms: int) -> None:
    """How long a prefill took, and a pair's transfer."""
    writing_ms = phase.transfer_ms if live.is_paired else 0.0  # after the first token
    live.first_heard_ms = now_ms - int(writing_ms)
    took_ms = phase.ended_ms - phase.started_ms - writing_ms
    placer.prefill_done(
        need=live.need,
        worker=live.prefill,
        computed_tokens=live.prompt_tokens - phase.cached_tokens,
        cached_tokens=phase.cached_tokens,
        took_ms=max(0.0, took_ms),
        now_ms=now_ms,
    )
    if live.is_paired:
        transferred(placer, live, phase, now_ms)


def transferred(placer: Placer, live: Live, phase: Phase, now_ms: int) -> None:
    """How long KV took from prefill to decode, where the phase says so."""
    if phase.kv_bytes and live.mode is Mode.REMOTE:
        placer.transferred(
            prefill=live.prefill,
            decode=live.decode,
            kv_bytes=phase.kv_bytes,
            tokens=live.prompt_tokens,
            took_ms=phase.transfer_ms,
            now_ms=now_ms,
        )


def answered(placer: Placer, live: Live, worker: Worker, outcome: Outcome, now_ms: int) -> None:
    """How fast a whole answer was; nothing where it has one token or another router placed it."""
    decoded_tokens = outcome.completion_tokens - 1
    if not live.placed_ms or not outcome.first_token_ms or decoded_tokens < 1:
        return
    answered_ms = outcome.ended_ms - outcome.first_token_ms  # as its only worker says
    if live.first_heard_ms:  # the client had the first token from prefill
        answered_ms = now_ms - live.first_heard_ms
    placer.finished(
        need=live.need,
        mode=live.mode,
        orchestration=live.orchestration,
        worker=worker.life,
        computed_tokens=outcome.prompt_tokens - outcome.cached_tokens,
        prompt_tokens=outcome.prompt_tokens,
        ttft_ms=float(max(0, now_ms - answered_ms - live.placed_ms)),
        tpot_ms=max(0, answered_ms) / decoded_tokens,
        running=worker.running + worker.others_running,
        now_ms=now_ms,
    )
