"""Records of requests whose stories are told, and how a story looks."""

import io
from dataclasses import replace
from typing import Any

from rich.console import Console

from infra.story.screen import show
from infra.story.story import Story, build_stories
from schemas.records import (
    Candidate,
    Decision,
    DecisionKind,
    Estimate,
    Mode,
    Orchestration,
    PhaseKind,
    Reason,
    Role,
    TokenFrame,
    Work,
    WorkPhase,
)
from tests.streams.builders import T0, handle, outcome, phase, request


def work(phase: WorkPhase, worker_id: str, at_ms: int, **changes: Any) -> Work:
    """Return remote work for request r1."""
    base_request = request("r1", tokens=100)
    base = Work(
        request_id="r1",
        session_id=base_request.session_id,
        attempt=1,
        router_id="router-a",
        worker_id=worker_id,
        worker_epoch=1,
        phase=phase,
        mode=Mode.REMOTE,
        orchestration=Orchestration.PREFILL_FIRST,
        model="tiny",
        prompt_tokens=base_request.prompt_tokens,
        sampling=base_request.sampling,
        arrived_ms=T0,
        deadline_ms=base_request.deadline_ms,
        gateway_partition=0,
        dispatched_ms=T0 + at_ms,
    )
    return replace(base, **changes)


def decision(at_ms: int, kind: DecisionKind = DecisionKind.PLACE, **changes: Any) -> Decision:
    base = Decision(
        request_id="r1",
        session_id="s-r1",
        attempt=1,
        router_id="router-a",
        at_ms=T0 + at_ms,
        kind=kind,
        policy="learned",
        reason=Reason.LEARNED,
        mode=Mode.REMOTE,
        orchestration=Orchestration.PREFILL_FIRST,
        prefill_worker="prefill-0",
        decode_worker="decode-0",
    )
    return replace(base, **changes)


def frame(worker_id: str, at_ms: int, first_seq: int, count: int, **changes: Any) -> TokenFrame:
    """Return a frame with tokens of r1 behind those of another stream."""
    base = TokenFrame(
        worker_id=worker_id,
        at_ms=T0 + at_ms,
        request_ids=["other", "r1"],
        attempts=[1, 1],
        first_seqs=[0, first_seq],
        first_chars=[0, first_seq],
        token_counts=[2, count],
        token_ids=[7, 7, *range(first_seq, first_seq + count)],
        texts=["xx", "x" * count],
    )
    return replace(base, **changes)


PREFILL = work(WorkPhase.PREFILL, "prefill-0", 5)


KV = handle(PREFILL, T0 + 30_000)


DECODE = work(WorkPhase.DECODE, "decode-0", 31, kv=KV, prefill_worker="prefill-0")


PLACED = decision(
    4,
    queue_length=3,
    waited_ms=4,
    slack_ms=59_996,
    session_tokens=64,
    load=0.5,
    w_ttft=0.7,
    w_tpot=0.3,
    estimate=Estimate(
        ttft_local_ms=80,
        ttft_remote_ms=60,
        tpot_local_ms=11,
        tpot_remote_ms=10,
        score=0.7 * (60 - 80) / 60 - 0.3 * 0.1 + 0.02,
        samples=35,
        gain_ttft=(60 - 80) / 60,
        loss_tpot=0.1,
        kv_price=0.02,
    ),
    candidates=[
        Candidate(
            worker_id=f"prefill-{n}",
            role=Role.PREFILL,
            credits=9 - n,
            running=n,
            work_ahead_tokens=10 * n,
            cached_tokens=16 * n,
        )
        for n in range(8)
    ],
)


HANDED = decision(30, DecisionKind.HANDOFF, reason=Reason.PREFILL_DONE)


COMPUTED = replace(
    phase(PREFILL, PhaseKind.PREFILL_DONE, T0 + 28, prompt_tokens=100, cached_tokens=36),
    started_ms=T0 + 8,
)


RECEIVED = phase(DECODE, PhaseKind.KV_RECEIVED, T0 + 36, kv_bytes=2_000_000, transfer_ms=4.0)


ENDED = outcome(
    DECODE,
    T0 + 100,
    completion_tokens=5,
    orchestration=Orchestration.PREFILL_FIRST,
)


FRAMES = [frame("prefill-0", 27, 0, 1), frame("decode-0", 50, 1, 2), frame("decode-0", 99, 3, 2)]


def remote(**changes: Any) -> Story:
    """Return the story of r1, placed remotely and completed with five tokens."""
    base_request = request("r1", tokens=100, **changes)
    records: list[Any] = [PLACED, HANDED, PREFILL, DECODE, COMPUTED, RECEIVED, ENDED, *FRAMES]
    return build_stories([base_request], records)["r1"]


def render_story(story: Story) -> str:
    out = io.StringIO()
    show(story, Console(file=out, width=160, highlight=False))
    return out.getvalue()
