"""Placement policies: which workers run a request, in which mode, and why.

A policy is a pure function of what is needed and of the fleet; `POLICIES` maps the names that
settings use. It returns None where the request has to wait. Ties fall to the lower worker id; what
this router has already dispatched counts as load at once, so that a fresh worker does not draw a
herd between two heartbeats. `streams/core/dispatcher.py` calls.
"""

from collections.abc import Callable
from dataclasses import dataclass

from schemas.records import Candidate, Mode, Orchestration, Reason, Role, Session
from streams.core.fleet import Fleet, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a policy may know of a request and of its surroundings."""

    prompt_tokens: int
    session: Session | None
    underway: int  # remote placements that wait for their decode worker
    handover_ahead: int  # how many of them there may be beyond the free decode credits
    local_after_ms: int  # without a prefill worker for so long, decode workers compute prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A chosen way to run a request; `decode` is absent while no decode worker has credit."""

    policy: str
    mode: Mode
    reason: Reason
    prefill: Worker | None = None
    decode: Worker | None = None
    orchestration: Orchestration = Orchestration.NONE


Policy = Callable[[Need, Fleet, int], Placement | None]


def prefill_first(need: Need, fleet: Fleet, now_ms: int) -> Placement | None:
    """Remote where both pools have credit, else a replica; local with no prefill pool for long."""
    return (
        _remote(need, fleet, now_ms) or replica(need, fleet, now_ms) or _local(need, fleet, now_ms)
    )


def replica(need: Need, fleet: Fleet, now_ms: int) -> Placement | None:
    """The whole request on the session's replica, or on the least loaded one."""
    worker, reason = choose_decode(need.session, fleet, Role.REPLICA, now_ms)
    if worker is None:
        return None
    if reason is Reason.LEAST_WORK and not fleet.any_lives(Role.DECODE, now_ms):
        reason = Reason.ONLY_REPLICAS
    return Placement(policy="replica", mode=Mode.REPLICA, reason=reason, decode=worker)


POLICIES: dict[str, Policy] = {"prefill_first": prefill_first, "replica": replica}


def _remote(need: Need, fleet: Fleet, now_ms: int) -> Placement | None:
    prefill = _least(fleet, Role.PREFILL, now_ms, by_work=True)
    if prefill is None or not fleet.any_lives(Role.DECODE, now_ms):
        return None
    decode_credits = sum(credits for _, credits in fleet.free(Role.DECODE, now_ms))
    if need.underway >= decode_credits + need.handover_ahead:
        return None
    decode, reason = choose_decode(need.session, fleet, Role.DECODE, now_ms)
    return Placement(
        policy="prefill_first",
        mode=Mode.REMOTE,
        orchestration=Orchestration.PREFILL_FIRST,
        reason=reason,
        prefill=prefill,
        decode=decode,
    )


def _local(need: Need, fleet: Fleet, now_ms: int) -> Placement | None:
    if fleet.prefill_absent_ms(now_ms) < need.local_after_ms:
        return None
    worker, _ = choose_decode(need.session, fleet, Role.DECODE, now_ms)
    if worker is None:
        return None
    return Placement(
        policy="prefill_first", mode=Mode.LOCAL, reason=Reason.NO_WORKER, decode=worker
    )


def choose_decode(
    session: Session | None, fleet: Fleet, role: Role, now_ms: int
) -> tuple[Worker | None, Reason]:
    """The session's worker if it lives and has credit, else the least loaded one, and why."""
    reason = Reason.LEAST_WORK
    if session is not None:
        known = fleet.worker(session.decode_worker, role)
        if known is None or known.epoch != session.worker_epoch or not known.lives(now_ms):
            reason = Reason.SESSION_WORKER_GONE
        elif known.credits(now_ms):
            return known, Reason.SESSION_WORKER
        else:
            reason = Reason.SESSION_WORKER_FULL
    return _least(fleet, role, now_ms, by_work=False), reason


def _least(fleet: Fleet, role: Role, now_ms: int, *, by_work: bool) -> Worker | None:
    """The worker with credit that has least before it: prompt tokens for prefill, else requests."""
    best, least = None, (0, 0)
    for worker, _ in fleet.free(role, now_ms):
        tokens = worker.work_ahead_tokens + worker.others_tokens
        requests = worker.running + worker.others_running
        load = (tokens, requests) if by_work else (requests, tokens)
        if best is None or load < least:
            best, least = worker, load
    return best


def candidates(
    fleet: Fleet, roles: tuple[Role, ...], chosen: tuple[Worker | None, ...], most: int, now_ms: int
) -> tuple[Candidate, ...]:
    """What a decision looked at: the chosen workers first, then others that live, `most` in all."""
    workers = [worker for worker in chosen if worker is not None]
    for role in roles:
        for worker in fleet.by_role[role]:
            if len(workers) >= most:
                break
            if worker not in workers and worker.lives(now_ms):
                workers.append(worker)
    return tuple(
        Candidate(
            worker_id=worker.worker_id,
            role=worker.role,
            credits=worker.credits(now_ms),
            running=worker.running,
            work_ahead_tokens=worker.work_ahead_tokens,
        )
        for worker in workers[:most]
    )
