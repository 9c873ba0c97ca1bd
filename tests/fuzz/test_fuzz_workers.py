"""What workers read from their topics, with fields as nobody means them: work, cancellations,
orders of roles. What is held ends, and all that is said of it fits on the log."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import RecordError, RecordTooLarge
from schemas.records import AssignRoles, CancelWork, Role, Work
from schemas.rules.sizes import check_size
from tests.fuzz.strategies import CODEC, examples, record_bytes
from tests.schemas.examples import instances
from tests.workers.fakes import EPOCH, WORKER, capability, handle, out, work
from tests.workers.llm.worker_in_memory import NOW_MS, WorkerInMemory
from workers.llm.stream import WorkerIdentity
from workers.roles import RoleOrders, lease_topics

NUMBERS = st.sampled_from([-(2**31), -1, 0, 1, 2, 2**31 - 1])
TIMES = st.sampled_from([-(2**63), 0, NOW_MS - 1, NOW_MS, NOW_MS + 99, 2**63 - 1])
IDS = st.sampled_from(["r1", "r1.1", "", "\x00", "x" * 2_000])
EPOCHS = st.sampled_from([EPOCH, EPOCH, -(2**63), 0, 2**63 - 1])
WORKERS = st.sampled_from([WORKER, WORKER, "w2", "", "x" * 2_000])
HANDLES = st.builds(
    dataclasses.replace,
    instances("trivium.KvHandle") | st.just(handle(NOW_MS + 99, "w2")),
    worker_id=st.sampled_from(["w2", WORKER, "", "x" * 2_000]),
    worker_epoch=EPOCHS,
    expires_at_ms=TIMES,
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "request_id": IDS,
    "session_id": IDS,
    "attempt": NUMBERS,
    "router_id": IDS,
    "worker_id": WORKERS,
    "worker_epoch": EPOCHS,
    "model": st.sampled_from(["m", "other", ""]),
    "prompt_tokens": st.binary(max_size=9),
    "sampling": instances("trivium.Sampling"),
    "gateway_partition": NUMBERS,
    "first_seq": NUMBERS,
    "first_char": NUMBERS,
    "first_token_ms": TIMES,
    "cached_tokens": NUMBERS,
    "arrived_ms": TIMES,
    "deadline_ms": TIMES,
    "kv": st.none() | HANDLES,
    "kv_target": st.none() | HANDLES,
    "prefill_worker": IDS,
}
ENUMS = {
    name: instances(f"trivium.{kind}")
    for name, kind in (
        ("phase", "WorkPhase"),
        ("mode", "Mode"),
        ("orchestration", "Orchestration"),
    )
}
WORK = st.builds(
    lambda changes: work(now_ms=NOW_MS, **changes),
    st.fixed_dictionaries({}, optional={**FIELDS, **ENUMS}),
)
CANCELLATIONS = st.builds(
    CancelWork,
    request_id=IDS,
    attempt=NUMBERS,
    worker_id=WORKERS,
    at_ms=TIMES,
    void=st.booleans(),
)


def check_output(worker: WorkerInMemory) -> None:
    """Check that all frames, reports and phases of the worker can be written."""
    for batch in worker.frames.take(NOW_MS):
        CODEC.encode(batch.frame)
        assert batch.partition in (0, 1)
        assert min((*batch.frame.first_seqs, *batch.frame.first_chars), default=0) >= 0
        for record, _ in batch.reports:
            check_size(record, len(CODEC.encode(record)))
    for phase in worker.phases:
        check_size(phase, len(CODEC.encode(phase)))


def given_to(worker: WorkerInMemory, value: bytes) -> None:
    """As a worker's loop does; what it would bury leaves nothing."""
    before = len(worker.requests)
    try:
        order = CODEC.decode(value)
        check_size(order, len(value))
        if isinstance(order, Work):
            worker.take(order)
        elif isinstance(order, CancelWork):
            worker.requests.cancel(order, NOW_MS)
    except RecordError:
        assert len(worker.requests) == before


@examples(150)
@given(
    st.lists(
        WORK.map(CODEC.encode)
        | CANCELLATIONS.map(CODEC.encode)
        | record_bytes(("Work", "CancelWork", "AssignRoles")),
        max_size=8,
    ),
    st.sampled_from(["stop", "handover", "abort", "expire", "give back"]),
)
def test_worker_finishes_requests_despite_forged_work(values: list[bytes], end: str) -> None:
    worker = WorkerInMemory(held_max=3, seen_max=4)
    for value in values:
        given_to(worker, value)
        assert len(worker.requests) <= 3
    jobs = [job.request_id for job in worker.engine.jobs]
    worker.step(*(out(job_id, [5], "ab", kv_bytes=7) for job_id in jobs))
    check_output(worker)
    if end == "expire":
        worker.requests.expire(2**63 - 1)
    elif end == "give back":
        worker.requests.give_back(RecordError("x").to_wire(), NOW_MS)
    else:
        kv = handle(NOW_MS + 99) if end == "handover" else None
        worker.step(*(out(job_id, [6], "c", finish_reason=end, kv=kv) for job_id in jobs))
    check_output(worker)
    assert len(worker.requests) == 0
    assert worker.requests.next_deadline_ms is None


@pytest.mark.parametrize("field", ["kv", "kv_target"])
def test_record_size_check_limits_names_in_handle(field: str) -> None:
    """The outcome would repeat these names, and the log would refuse it."""
    fields: dict[str, Any] = {field: handle(NOW_MS + 99, "x" * 2_000)}
    order = work(now_ms=NOW_MS, **fields)
    with pytest.raises(RecordTooLarge, match="names of at most"):
        check_size(order, len(CODEC.encode(order)))


@examples(200)
@given(st.lists(st.sampled_from(Role), max_size=5), WORKERS, EPOCHS)
def test_role_orders_ignore_invalid_roles(roles: list[Role], name: str, epoch: int) -> None:
    async def follow(_: Any) -> None:
        raise AssertionError("nobody runs it")

    orders = RoleOrders(WorkerIdentity(worker_id=WORKER, epoch=EPOCH), capability(), follow)
    orders.take(AssignRoles(worker_id=name, worker_epoch=epoch, roles=roles, at_ms=0))
    if orders._next_roles is not None:
        assert (name, epoch) == (WORKER, EPOCH) and lease_topics(orders._next_roles)
        assert len(orders._next_roles) == len(set(roles))
