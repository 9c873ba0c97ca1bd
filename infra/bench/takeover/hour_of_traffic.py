"""Makes all records of a request quickly: encodes them once, then replaces the ids in the bytes.

A request is prefilled, handed over and decoded. The records are those that gateways, routers and
workers write on the topics of sessions. The router's core makes its own, over a small fleet. All
usage records have the same number. `infra/bench/takeover/main.py` calls this module.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from infra.bench.decisions.large_fleet import (
    ROUTER,
    FleetSize,
    FleetTraffic,
    completed_outcome,
    prefill_phase,
)
from schemas.codec import Codec
from schemas.records import PhaseKind, Work
from schemas.rules.outcomes import outcome_key
from schemas.rules.tokens import pack_tokens
from streams.config import RouterSettings
from streams.core.effects import Decide, Dispatch, RecordUsage, SaveSession
from streams.core.events import (
    Event,
    FleetRecordArrived,
    OutcomeArrived,
    PartitionReady,
    PartitionTaken,
    PhaseArrived,
    RequestArrived,
)
from streams.core.router import Router

LATER_MS = 1 << 42  # a deadline that never passes; other times of the templates do not matter
_ID, _SESSION = "req-00000000000000000000", "session-000000000000"
_FLEET = FleetSize(workers=10, sessions=1, blocks=1)


class RecordSource:
    """Makes the records of each request by its number; `turns` requests are one conversation."""

    def __init__(self, *, prompt_tokens: int, turns: int) -> None:
        self._turns = turns
        codec = Codec()
        self._templates = [
            (topic, key.encode(), codec.encode(record))
            for topic, key, record in _records(prompt_tokens)
        ]

    def session_id(self, number: int) -> str:
        """Return the session id of this request number."""
        return f"session-{number // self._turns:012d}"

    def session(self, number: int) -> tuple[bytes, bytes]:
        """Return key and value of the session record of this request's conversation."""
        _, key, value = next(template for template in self._templates if template[0] == "sessions")
        session_id = self.session_id(number).encode()
        return _fill(key, b"", session_id), _fill(value, b"", session_id)

    def records(self, number: int, *, has_ended: bool) -> Iterator[tuple[str, bytes, bytes]]:
        """Yield topic, key and value in written order; without an end, the request is live."""
        request_id = f"req-{number:020d}".encode()
        session_id = self.session_id(number).encode()
        for topic, key, value in self._templates:
            if has_ended or topic not in ("outcomes", "usage", "sessions"):
                yield (
                    topic,
                    _fill(key, request_id, session_id),
                    _fill(value, request_id, session_id),
                )


def _fill(template: bytes, request_id: bytes, session_id: bytes) -> bytes:
    return template.replace(_ID.encode(), request_id).replace(_SESSION.encode(), session_id)


def _records(prompt_tokens: int) -> Iterator[tuple[str, str, Any]]:
    """Yield topic, key and record, in the order in which they are written."""
    traffic, router = FleetTraffic(_FLEET, seed=1, start_ms=0), Router(ROUTER, RouterSettings())
    for record in traffic.registrations():
        router.apply(FleetRecordArrived(record, 0), 0)
    for beat in traffic.heartbeats(1, 0):
        router.apply(FleetRecordArrived(beat, 1), 0)
    for event in (PartitionTaken(0), PartitionReady(0)):
        router.apply(event, 0)
    request = replace(
        traffic.request(0, 0),
        request_id=_ID,
        parent_id=_ID,
        session_id=_SESSION,
        prompt_tokens=pack_tokens(range(prompt_tokens)),
        deadline_ms=LATER_MS,
    )
    yield "requests", _SESSION, request
    decision, work = _placed(router, RequestArrived(request, 0))
    yield "decisions", _SESSION, decision
    phase = prefill_phase(work, 30)
    yield "phases", _SESSION, phase
    decision, work = _placed(router, PhaseArrived(phase, 0))
    yield "decisions", _SESSION, decision
    received = replace(phase, kind=PhaseKind.KV_RECEIVED, worker_id=work.worker_id, kv=None)
    yield "phases", _SESSION, received
    outcome = completed_outcome(work, 2_000)
    yield "outcomes", outcome_key(outcome), outcome
    saved, used = router.apply(OutcomeArrived(outcome, 0), 0)
    assert isinstance(saved, SaveSession) and isinstance(used, RecordUsage)
    yield "usage", _ID, replace(used.usage, number=0)
    yield "sessions", _SESSION, saved.session


def _placed(router: Router, event: Event) -> tuple[Any, Work]:
    """Return the decision on this event, and the work for the worker."""
    decided, order = router.apply(event, 0)
    assert isinstance(decided, Decide) and isinstance(order, Dispatch)
    assert isinstance(order.record, Work)
    return decided.decision, order.record
