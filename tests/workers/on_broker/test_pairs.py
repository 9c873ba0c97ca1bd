"""Orchestrations between two workers on a real broker, with real NIXL; the test is the router."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from schemas import prefix
from schemas.records import (
    KvEvents,
    KvHandle,
    Mode,
    Orchestration,
    Outcome,
    OutcomeKind,
    Phase,
    PhaseKind,
    Role,
    Sampling,
    TokenFrame,
    WorkPhase,
)
from schemas.rules.tokens import pack_tokens
from schemas.settings import LogSettings
from tests.waits import until
from tests.workers.fakes import cancel_work
from tests.workers.on_broker.router import Router, chat, router_of, worker_of

pytest.importorskip("nixl", reason="the NIXL library is missing")
pytestmark = pytest.mark.kafka
PREFILL, DECODE = WorkPhase.PREFILL, WorkPhase.DECODE
CONCURRENT, DECODE_FIRST = Orchestration.CONCURRENT, Orchestration.DECODE_FIRST
PROMPT = [20 + n % 300 for n in range(200)]


@asynccontextmanager
async def pools(kafka: LogSettings, **changes: Any) -> AsyncIterator[Router]:
    """A prefill worker `p`, a decode worker `d`, and a replica `r` that nobody shares KV with."""
    async with (
        router_of(kafka) as router,
        worker_of(router, "p", Role.PREFILL, transfer="nixl", **changes),
        worker_of(router, "d", Role.DECODE, transfer="nixl"),
        worker_of(router, "r", Role.REPLICA, transfer="none"),
    ):
        yield router


def promised(router: Router, worker_id: str, job_id: str, tokens: int, until_ms: int) -> KvHandle:
    member = router.membership.view.members[worker_id]
    capability = member.registration.capability
    assert capability is not None
    return KvHandle(
        worker_id=worker_id,
        worker_epoch=member.epoch,
        engine_id=capability.engine_id,
        engine_request_id=job_id,
        tokens=tokens,
        block_size=capability.block_size,
        expires_at_ms=until_ms,
    )


async def start(
    router: Router, orchestration: Orchestration, request_id: str = "r1", **changes: Any
) -> None:
    """Send the work of a paired placement, as a router does."""
    shared: dict[str, Any] = {
        "orchestration": orchestration,
        "prompt_tokens": pack_tokens(PROMPT),
        "sampling": Sampling(max_tokens=24, temperature=0.0, ignore_eos=True),
        **changes,
    }
    decode = chat(request_id, DECODE, prefill_worker="p", **shared, **router.address("d"))
    job_id = f"{request_id}.1"
    kv = promised(router, "p", job_id, len(PROMPT), decode.deadline_ms)
    await router.send("decode", replace(decode, kv=kv), "d")
    target = promised(router, "d", job_id, 0, decode.deadline_ms)
    if orchestration is DECODE_FIRST:
        await until(lambda: phases(router, PhaseKind.KV_ALLOCATED, request_id) != [])
        (allocated,) = phases(router, PhaseKind.KV_ALLOCATED, request_id)
        assert allocated.kv is not None
        target = allocated.kv
    prefill = chat(request_id, PREFILL, **shared, **router.address("p"))
    await router.send("prefill", replace(prefill, kv_target=target), "p")


def phases(router: Router, kind: PhaseKind, request_id: str) -> list[Phase]:
    return [phase for phase in router.of(Phase, request_id) if phase.kind is kind]


def merged(router: Router, request_id: str) -> list[int]:
    """Return the tokens that two senders wrote; repeated ones must agree."""
    by_seq: dict[int, int] = {}
    for frame in router.of(TokenFrame):
        start = 0
        for n, row in enumerate(frame.request_ids):
            ids = frame.token_ids[start : start + frame.token_counts[n]]
            start += frame.token_counts[n]
            for seq, token in enumerate(ids, frame.first_seqs[n]):
                if row == request_id:
                    assert by_seq.setdefault(seq, token) == token
    assert sorted(by_seq) == list(range(len(by_seq)))
    return [by_seq[seq] for seq in sorted(by_seq)]


@pytest.mark.parametrize("orchestration", [CONCURRENT, DECODE_FIRST])
async def test_worker_pair_matches_replica_and_sends_each_block_once(
    kafka: LogSettings, orchestration: Orchestration
) -> None:
    async with pools(kafka) as router:
        alone = {
            "prompt_tokens": pack_tokens(PROMPT),
            "sampling": Sampling(max_tokens=24, temperature=0.0, ignore_eos=True),
        }
        order = chat("r0", DECODE, mode=Mode.REPLICA, **alone, **router.address("r"))
        await router.send("decode", order, "r")
        for request_id in ("r1", "r2"):  # the second finds the prompt's blocks at decode
            await start(router, orchestration, request_id)
            await until(lambda name=request_id: router.of(Outcome, name) != [])
            await until(lambda name=request_id: phases(router, PhaseKind.PREFILL_DONE, name) != [])
        await until(lambda: router.of(Outcome, "r0") != [])
        await until(lambda: len(merged(router, "r2")) == len(merged(router, "r0")) == 24)
        assert merged(router, "r1") == merged(router, "r2") == merged(router, "r0")
        for request_id in ("r1", "r2"):
            (outcome,) = router.of(Outcome, request_id)
            assert (outcome.kind, outcome.orchestration) == (
                OutcomeKind.COMPLETED,
                orchestration,
            )
            assert (outcome.prefill_worker, outcome.decode_worker) == ("p", "d")
            assert outcome.written_by == "d"
        written = [phases(router, PhaseKind.PREFILL_DONE, n)[0].kv_bytes for n in ("r1", "r2")]
        assert 0 < written[0]
        assert written[1] < written[0] / 4  # at most the block that holds the prompt's end
        starts = [s for f in router.of(TokenFrame) for s in f.starts if s.request_id == "r1"]
        assert {(s.prefill_worker, s.decode_worker) for s in starts} == {("p", "d")}


@pytest.mark.parametrize("void", [True, False])
@pytest.mark.parametrize("orchestration", [CONCURRENT, DECODE_FIRST])
async def test_worker_pair_releases_requests_after_cancellation(
    kafka: LogSettings, orchestration: Orchestration, void: bool
) -> None:
    async with pools(kafka, prefill_base_ms=600_000) as router:
        await start(router, orchestration)
        await until(lambda: all(running(router, worker_id) == 1 for worker_id in "pd"))
        for worker_id, topic in (("p", "prefill"), ("d", "decode")):
            order = replace(cancel_work("r1", worker_id=worker_id), void=void)
            await router.send(topic, order, worker_id)
        await until(lambda: all(running(router, worker_id) == 0 for worker_id in "pd"))
        if not void:
            await until(lambda: router.of(Outcome, "r1") != [])
        kinds = [outcome.kind for outcome in router.of(Outcome, "r1")]
        assert kinds == ([] if void else [OutcomeKind.CANCELLED])
        assert phases(router, PhaseKind.FAILED, "r1") == []


def running(router: Router, worker_id: str) -> int:
    load = router.membership.view.members[worker_id].load
    return load.running + load.waiting


async def test_workers_publish_hashes_of_cached_blocks(kafka: LogSettings) -> None:
    async with pools(kafka) as router:
        following = asyncio.create_task(router.follow("prefixes"))
        await start(router, CONCURRENT)
        hashes = {*prefix.chain(PROMPT, 16).tolist()}

        def stored(worker_id: str) -> set[int]:
            worker_events = [e for e in router.of(KvEvents) if e.worker_id == worker_id]
            return {block for events in worker_events for block in prefix.unpack(events.stored)}

        await until(lambda: all(hashes <= stored(worker_id) for worker_id in "pd"))
        await until(lambda: any(events.worker_id == "r" for events in router.of(KvEvents)))
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        for worker_id in "pdr":
            worker_events = [e for e in router.of(KvEvents) if e.worker_id == worker_id]
            assert [events.seq for events in worker_events] == list(range(len(worker_events)))
            assert worker_events[0].snapshot
