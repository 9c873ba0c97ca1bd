"""The records of an hour: a whole way each, under names of their own."""

from infra.bench.takeover.main import RecordSource
from schemas.codec import Codec
from schemas.records import DecisionKind, Mode, OutcomeKind, PhaseKind
from schemas.rules.tokens import token_count

CODEC = Codec()


def test_record_source_writes_all_records_of_request() -> None:
    source = RecordSource(prompt_tokens=300, turns=4)
    records = list(source.records(7, has_ended=True))
    topics = ["requests", "decisions", "phases", "decisions", "phases", "outcomes"]
    assert [topic for topic, _, _ in records] == [*topics, "usage", "sessions"]
    request, placed, prefill_done, handed, received, outcome, usage, session = (
        CODEC.decode(value) for _, _, value in records
    )
    of_it = (request, placed, prefill_done, handed, received, outcome, usage)
    assert {record.request_id for record in of_it} == {"req-00000000000000000007"}
    assert (
        session.session_id == request.session_id == source.session_id(7) == "session-000000000001"
    )
    assert token_count(request.prompt_tokens) == placed.prompt_tokens == 300
    assert (placed.kind, handed.kind) == (DecisionKind.PLACE, DecisionKind.HANDOFF)
    assert placed.mode is Mode.REMOTE and len(placed.candidates) >= 3
    assert (prefill_done.kind, received.kind) == (PhaseKind.PREFILL_DONE, PhaseKind.KV_RECEIVED)
    assert (prefill_done.worker_id, received.worker_id) == (
        placed.prefill_worker,
        placed.decode_worker,
    )
    assert outcome.kind is OutcomeKind.COMPLETED and session.decode_worker == received.worker_id


def test_record_source_omits_outcome_of_active_request() -> None:
    source = RecordSource(prompt_tokens=3, turns=1)
    topics = {topic for topic, _, _ in source.records(0, has_ended=False)}
    assert topics == {"requests", "decisions", "phases"}


def test_record_source_names_earlier_conversation() -> None:
    """A day's conversations are on the log when a router takes over."""
    source = RecordSource(prompt_tokens=3, turns=4)
    key, value = source.session(9)
    assert key.decode() == CODEC.decode(value).session_id == source.session_id(9)
    assert (key, value) == list(source.records(9, has_ended=True))[-1][1:]
