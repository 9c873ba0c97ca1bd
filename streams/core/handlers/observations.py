"""Turns phases and outcomes into observations, from which the estimates learn.

Hosts' clocks differ, so one host measures each duration: a worker within a phase or an answer, this
router from reading one record to reading another. Requests that an earlier router placed have no
placement note, so the estimates learn nothing from them.
"""

from schemas.records import Mode, Outcome, Phase
from streams.core.fleet.workers import Worker
from streams.core.placement.estimates import Estimates
from streams.core.requests.live import LiveRequest


def observe_prefill(estimates: Estimates, live: LiveRequest, phase: Phase, now_ms: int) -> None:
    """Observe the duration of a prefill, and of a pair's KV transfer."""
    writing_ms = phase.transfer_ms if live.is_paired else 0.0  # after the first token
    live.attempt.first_heard_ms = now_ms - int(writing_ms)
    if live.case is not None and live.case.note is not None:
        computed_tokens = live.prompt_tokens - phase.cached_tokens
        took_ms = max(0.0, phase.ended_ms - phase.started_ms - writing_ms)
        estimates.observe_prefill(live.case.note, live.attempt.prefill, computed_tokens, took_ms)
    if live.is_paired:
        observe_transfer(estimates, live, phase)


def observe_transfer(estimates: Estimates, live: LiveRequest, phase: Phase) -> None:
    """Observe the duration of a KV transfer from prefill to decode, if the phase has it."""
    if phase.kv_bytes and live.attempt.mode is Mode.REMOTE:
        estimates.observe_transfer(live.prompt_tokens, phase.transfer_ms)


def observe_answer(
    estimates: Estimates, live: LiveRequest, worker: Worker, outcome: Outcome, now_ms: int
) -> None:
    """Observe the speed of a whole answer; skip answers of one token and continued ones."""
    decoded_tokens = outcome.completion_tokens - 1
    if live.case is None or live.case.note is None or not live.attempt.placed_ms:
        return
    if live.prior.tokens or not outcome.first_token_ms or decoded_tokens < 1:
        return
    answered_ms = outcome.ended_ms - outcome.first_token_ms  # by its only worker's clock
    if live.attempt.first_heard_ms:  # the client had the first token from prefill
        answered_ms = now_ms - live.attempt.first_heard_ms
    estimates.observe_answer(
        live.case.note,
        worker,
        computed_tokens=outcome.prompt_tokens - outcome.cached_tokens,
        ttft_ms=float(max(0, now_ms - answered_ms - live.attempt.placed_ms)),
        tpot_ms=max(0, answered_ms) / decoded_tokens,
        now_ms=now_ms,
    )
