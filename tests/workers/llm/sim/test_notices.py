"""Notices between simulated engines: whole ones come back, others are refused and do no harm."""

import pytest

from schemas.records import KvHandle, WireError
from tests.virtual_time import run_virtual
from tests.waits import until
from tests.workers.llm.engines import answered, job, prompt, start_sim, transfer_of
from tests.workers.llm.sim.engine_pairs import closed
from workers.llm.sim.moves import Notice, NoticeKind

TARGET = KvHandle(
    worker_id="worker",
    worker_epoch=2,
    engine_id="engine",
    engine_request_id="request.1",
    tokens=32,
    block_size=16,
    block_ids=[3, 4, 9],
    expires_at_ms=1_000,
    params=b"\x00\xff",
)


@pytest.mark.parametrize(
    "notice",
    [
        Notice(kind=NoticeKind.READ, key="request.1-a", kv_bytes=4_096),
        Notice(kind=NoticeKind.WANT, key="request.1", target=TARGET),
        Notice(kind=NoticeKind.UNWANTED, key="request.1", target=TARGET),
        Notice(
            kind=NoticeKind.DROPPED,
            key="request.1",
            error=WireError(code="kv_unavailable", message="late", retriable=True),
        ),
    ],
)
def test_notice_round_trips_through_packing(notice: Notice) -> None:
    assert Notice.unpack(notice.pack()) == notice


BROKEN = [
    b"",
    b"junk",
    b"[1]",
    b'{"kind": "read"}',
    b'{"kind": "sung", "key": "a"}',
    b'{"kind": "want", "key": "a"}',
    b'{"kind": "read", "key": "a", "colour": 1}',
    b'{"kind": "want", "key": "a", "target": {"params": "zz"}}',
]


@pytest.mark.parametrize("data", BROKEN)
def test_unpack_rejects_malformed_notice(data: bytes) -> None:
    with pytest.raises(ValueError, match="notice: expected one of a simulated engine"):
        Notice.unpack(data)


def test_engine_ignores_malformed_and_unknown_notices() -> None:
    async def main() -> None:
        engine = await start_sim()
        transfer_of(engine).notices += BROKEN
        for kind in (NoticeKind.READ, NoticeKind.WROTE, NoticeKind.DROPPED):
            transfer_of(engine).notices.append(Notice(kind=kind, key="unknown").pack())
        await until(lambda: not transfer_of(engine).notices)
        assert len((await answered(engine, job(prompt(20)))).token_ids) == 12
        await closed(engine)

    run_virtual(main())
