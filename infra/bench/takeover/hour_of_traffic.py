"""The records of a request's whole way, made quickly: encoded once, then with other names in them.

A request is prefilled, handed over and decoded: what gateways, routers and workers write on the
topics of sessions. Used by `infra/bench/takeover/main.py`.
"""

from collections.abc import Iterator
from typing import Any

from schemas.codec import Codec
from schemas.records import (
    Candidate,
    Decision,
    DecisionKind,
    Endpoint,
    Mode,
    Orchestration,
    Outcome,
    OutcomeKind,
    Phase,
    PhaseKind,
    Priority,
    Reason,
    Request,
    Role,
    Sampling,
    Session,
)
from schemas.rules.outcomes import outcome_key
from schemas.rules.tokens import pack_tokens

LATER_MS = 1 << 42  # deadlines that nobody meets; no time of the template matters
_ID, _SESSION = "req-00000000000000000000", "session-000000000000"
_CANDIDATE = Candidate(
    worker_id="decode-0", role=Role.DECODE, credits=8, running=3, work_ahead_tokens=900
)


class RecordSource:
    """Records of request number n; a conversation has so many turns."""

    def __init__(self, *, prompt_tokens: int, turns: int) -> None:
        self._turns = turns
        codec = Codec()
        self._templates = [
            (topic, key.encode(), codec.encode(record))
            for topic, key, record in _records(prompt_tokens)
        ]

    def session_id(self, number: int) -> str:
        """Whose turn it is."""
        return f"session-{number // self._turns:012d}"

    def records(self, number: int, *, has_ended: bool) -> Iterator[tuple[str, bytes, bytes]]:
        """Topic, key and value, as they are written; without its end for one that still lives."""
        request_id = f"req-{number:020d}".encode()
        session_id = self.session_id(number).encode()
        for topic, key, value in self._templates:
            if has_ended or topic not in ("outcomes", "sessions"):
                yield (
                    topic,
                    _named(key, request_id, session_id),
                    _named(value, request_id, session_id),
                )


def _named(template: bytes, request_id: bytes, session_id: bytes) -> bytes:
    return template.replace(_ID.encode(), request_id).replace(_SESSION.encode(), session_id)


def _records(prompt_tokens: int) -> Iterator[tuple[str, str, Any]]:
    """Topic, key and record, in the order in which they are written."""
    request = Request(
        request_id=_ID,
        parent_id=_ID,
        session_id=_SESSION,
        endpoint=Endpoint.CHAT,
        priority=Priority.STANDARD,
        model="tiny",
        prompt_tokens=pack_tokens(range(prompt_tokens)),
        sampling=Sampling(max_tokens=200),
        arrived_ms=0,
        deadline_ms=LATER_MS,
        gateway_id="gateway-0",
        gateway_partition=0,
    )
    yield "requests", _SESSION, request
    for kind, reason in (
        (DecisionKind.PLACE, Reason.FIRST_TURN),
        (DecisionKind.HANDOFF, Reason.PREFILL_DONE),
    ):
        yield "decisions", _SESSION, _decision(kind, reason, prompt_tokens)
    for phase, worker_id in (
        (PhaseKind.PREFILL_DONE, "prefill-0"),
        (PhaseKind.KV_RECEIVED, "decode-0"),
    ):
        yield "phases", _SESSION, _phase(phase, worker_id, prompt_tokens)
    outcome = _outcome(prompt_tokens)
    yield "outcomes", outcome_key(outcome), outcome
    session = Session(
        session_id=_SESSION,
        decode_worker="decode-0",
        worker_epoch=1,
        context_tokens=prompt_tokens + 200,
        turns=1,
        last_used_ms=0,
    )
    yield "sessions", _SESSION, session


def _decision(kind: DecisionKind, reason: Reason, prompt_tokens: int) -> Decision:
    return Decision(
        request_id=_ID,
        session_id=_SESSION,
        attempt=1,
        router_id="router-0",
        at_ms=0,
        kind=kind,
        policy="learned",
        reason=reason,
        mode=Mode.REMOTE,
        orchestration=Orchestration.PREFILL_FIRST,
        prefill_worker="prefill-0",
        prefill_epoch=1,
        decode_worker="decode-0",
        decode_epoch=1,
        queue_length=0,
        waited_ms=3,
        slack_ms=60_000,
        prompt_tokens=prompt_tokens,
        session_tokens=0,
        candidates=(_CANDIDATE,) * 4,
    )


def _phase(kind: PhaseKind, worker_id: str, prompt_tokens: int) -> Phase:
    return Phase(
        request_id=_ID,
        session_id=_SESSION,
        attempt=1,
        router_id="router-0",
        worker_id=worker_id,
        worker_epoch=1,
        kind=kind,
        started_ms=0,
        ended_ms=30,
        prompt_tokens=prompt_tokens,
        kv_bytes=1 << 20,
    )


def _outcome(prompt_tokens: int) -> Outcome:
    return Outcome(
        request_id=_ID,
        session_id=_SESSION,
        attempt=1,
        kind=OutcomeKind.COMPLETED,
        finish_reason="length",
        written_by="decode-0",
        mode=Mode.REMOTE,
        prefill_worker="prefill-0",
        decode_worker="decode-0",
        prompt_tokens=prompt_tokens,
        completion_tokens=200,
        ended_ms=2_000,
    )
