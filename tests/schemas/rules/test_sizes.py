"""The size rule: what is let in leaves room for everything that follows from it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from schemas.codec import Codec
from schemas.errors import (
    MESSAGE_CHARS_MAX,
    EngineFailed,
    RecordError,
    RecordTooLarge,
    clip_message,
)
from schemas.records import KvHandle, Phase, PhaseKind, Probing, Request, Role
from schemas.rules.sizes import (
    FLEET_BYTES_MAX,
    NAME_CHARS_MAX,
    RECORD_BYTES_MAX,
    REPORT_BYTES_MAX,
    REQUEST_BYTES_MAX,
    REST_BYTES_MAX,
    RETRIEVAL_BYTES_MAX,
    check_size,
)
from streams.core.handlers.orders import work
from streams.core.requests.live import new_live_request
from tests.schemas.examples import RECORDS, TRACEPARENT, class_of, example

CODEC, FRAMING_BYTES = Codec(), 10
NOW_MS = 1_790_000_000_000
LONG_NAME = "n" * NAME_CHARS_MAX


def filled(record: Any, bytes_max: int, fill: Any) -> Any:
    """The largest record of the kind that keeps the rule: filled up to the last byte."""
    size = bytes_max - len(CODEC.encode(fill(record, 0)))
    while len(CODEC.encode(fill(record, size))) > bytes_max:
        size -= 1
    largest = fill(record, size)
    check_size(largest, len(CODEC.encode(largest)))
    return largest


def with_prompt(request: Request, size: int) -> Request:
    return replace(request, prompt_tokens=bytes(size))


def with_handle(phase: Phase, size: int) -> Phase:
    assert phase.kv is not None
    return replace(phase, kv=replace(phase.kv, params=bytes(size)))


def with_tools(request: Request, size: int) -> Request:
    assert request.parsing is not None
    return replace(request, parsing=replace(request.parsing, tools="t" * size))


@pytest.mark.parametrize("fill", [with_prompt, with_tools])
def test_work_of_largest_request_and_handle_fits_record(fill: Any) -> None:
    """Every request that a gateway accepts can be sent to a worker."""
    draft = replace(
        example("trivium.Request"), request_id=LONG_NAME, parent_id=LONG_NAME, session_id=LONG_NAME
    )
    draft = replace(draft, tenant=LONG_NAME, model=LONG_NAME, gateway_id=LONG_NAME, retrieval=None)
    request = filled(draft, REQUEST_BYTES_MAX, fill)
    kv = example("trivium.KvHandle")
    assert isinstance(kv, KvHandle)
    report = replace(example("trivium.Phase"), kind=PhaseKind.PREFILL_DONE, kv=kv)
    report = filled(report, REPORT_BYTES_MAX, with_handle)
    live = new_live_request(request, 0)
    live.attempt.prefill = live.attempt.decode = (LONG_NAME, 1)
    worker: Any = SimpleNamespace(
        worker_id=LONG_NAME, epoch=1, role=Role.DECODE, topic="decode", partition=0
    )
    record = work(LONG_NAME, live, worker, NOW_MS, kv=report.kv).record
    headers = sum(map(len, (TRACEPARENT, LONG_NAME))) + 500
    assert len(CODEC.encode(record)) + headers <= RECORD_BYTES_MAX
    check_size(record, len(CODEC.encode(record)))


@pytest.mark.parametrize("wish", [{"tokens_max": 99, "room_tokens": 500}, {"tokens_max": 500}])
def test_request_size_reserves_room_for_retrieved_tokens(wish: dict[str, int]) -> None:
    fields = {**wish, "k": 10, "joint": b"", "at": 0, "by_ms": 0, "tail_at": 0, "probing": None}
    retrieval = replace(example("trivium.Retrieval"), **{"room_tokens": 0, **fields})
    record = replace(example("trivium.Request"), retrieval=retrieval)
    check_size(record, REQUEST_BYTES_MAX - 2_000)
    with pytest.raises(RecordTooLarge, match=f"found {REQUEST_BYTES_MAX + 1}"):
        check_size(record, REQUEST_BYTES_MAX - 1_999)
    joined = replace(record, retrieval=replace(retrieval, joint=bytes(999)))
    with pytest.raises(RecordTooLarge):
        check_size(joined, REQUEST_BYTES_MAX - 9_000)
    probing = Probing(tokens_max=100, probes_max=3, k=2, lead=b"l" * 4, joint=b"", trail=b"t" * 8)
    probed = replace(record, retrieval=replace(retrieval, probing=probing))
    check_size(probed, REQUEST_BYTES_MAX - 2_436)
    with pytest.raises(RecordTooLarge):
        check_size(probed, REQUEST_BYTES_MAX - 2_435)


@pytest.mark.parametrize("kind", [name for name in RECORDS if name in ("Request", "Phase")])
def test_check_size_rejects_record_above_its_limit(kind: str) -> None:
    record = example(f"trivium.{kind}")
    if kind == "Request":
        record = replace(record, retrieval=None)
    bytes_max = {"Request": REQUEST_BYTES_MAX, "Phase": REPORT_BYTES_MAX}[kind]
    check_size(record, bytes_max)
    with pytest.raises(
        RecordTooLarge, match=f"expected at most {bytes_max} bytes, found {bytes_max + 1}"
    ):
        check_size(record, bytes_max + 1)


@pytest.mark.parametrize(
    "kind",
    ["Request", "Cancellation", "Resumption", "Work", "CancelWork", "Phase", "Outcome"],
)
def test_check_size_rejects_long_names_in_request_records(kind: str) -> None:
    record = example(f"trivium.{kind}")
    check_size(replace(record, request_id=LONG_NAME), 1)
    with pytest.raises(RecordTooLarge, match="expected names of at most"):
        check_size(replace(record, request_id=LONG_NAME + "n"), 1)


@pytest.mark.parametrize(
    ("kind", "field", "bytes_max"),
    [
        ("Registration", "roles", FLEET_BYTES_MAX),
        ("Heartbeat", "grants", FLEET_BYTES_MAX),
        ("Wanted", "pools", FLEET_BYTES_MAX),
        ("RetrievalRequest", "seeds", RETRIEVAL_BYTES_MAX),
        ("Hits", "document_ids", RETRIEVAL_BYTES_MAX),
        ("AssignRoles", "roles", REST_BYTES_MAX),
    ],
)
def test_codec_rejects_oversized_record_before_reading(
    kind: str, field: str, bytes_max: int
) -> None:
    """Many small items take 0.2 to 0.6 s per MB, and all members read the fleet."""
    record = example(f"trivium.{kind}")
    items = getattr(record, field)
    value = CODEC.encode(replace(record, **{field: [items[0]] * bytes_max}))
    unreadable = value[:FRAMING_BYTES] + b"\xff" * len(value)  # so that it is refused unread
    for data in (value, unreadable):
        with pytest.raises(RecordTooLarge, match=f"{kind}: expected at most {bytes_max} bytes"):
            CODEC.decode(data)
    with pytest.raises(RecordError, match="damaged"):
        CODEC.decode(unreadable[:100])


@pytest.mark.parametrize("name", RECORDS)
def test_check_size_limits_every_record_to_record_bytes_max(name: str) -> None:
    record = example(f"trivium.{name}")
    assert isinstance(record, class_of(name))
    with pytest.raises(RecordTooLarge):
        check_size(record, RECORD_BYTES_MAX + 1)


def test_wire_error_messages_are_clipped() -> None:
    """An error fits beside all other fields of a record, however much it quotes."""
    assert clip_message("short") == "short"
    wire = EngineFailed("x" * 9_000_000).to_wire()
    assert len(wire.message) == MESSAGE_CHARS_MAX and wire.message.endswith("...")
    assert MESSAGE_CHARS_MAX * 4 < REST_BYTES_MAX
