"""A request's story: found by its id, put together, and shown in one screen."""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from infra.cli.explain import as_json_value, duration_ms, show
from infra.cli.options import print_json
from infra.story import Story, TokenRow, tell
from infra.story_log import ACCEPT_MS, CLOCKS_MS, Window, collect, find_request, window_of
from infra.story_steps import steps_of
from schemas.errors import ConfigError, NotFound
from schemas.records import (
    CancelWork,
    Candidate,
    Decision,
    DecisionKind,
    Estimate,
    Mode,
    Orchestration,
    OutcomeKind,
    Phase,
    PhaseKind,
    Reason,
    Role,
    TokenFrame,
    WireError,
    Work,
    WorkPhase,
)
from schemas.settings import LogSettings
from schemas.topics import partition_of
from streams.gateway.ids import arrival_of, new_request_id
from tests.streams.builders import T0, cancellation, handle, outcome, phase, request, resumption

LOG = LogSettings(session_partitions=4, worker_partitions=2)
HOUR_MS = 3_600_000


class FakeLog:
    """Records by topic and partition, with the time at which each was written."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, int], list[tuple[int, Any]]] = {}
        self.asked: list[tuple[str, tuple[int, ...], Window]] = []

    def add(self, topic: str, partition: int, at_ms: int, record: Any) -> None:
        self.records.setdefault((topic, partition), []).append((at_ms, record))

    async def find(
        self, topic: str, partitions: Sequence[int], needle: str, window: Window, limit: int = 0
    ) -> list[Any]:
        self.asked.append((topic, tuple(partitions), window))
        return [
            record
            for partition in partitions
            for at_ms, record in self.records.get((topic, partition), [])
            if window.since_ms <= at_ms < window.until_ms and needle in str(record)
        ][: limit or None]


def work(phase: WorkPhase, worker_id: str, at_ms: int, **changes: Any) -> Work:
    """Remote work for r1."""
    asked = request("r1", tokens=100)
    base = Work(
        request_id="r1",
        session_id=asked.session_id,
        attempt=1,
        router_id="router-a",
        worker_id=worker_id,
        worker_epoch=1,
        phase=phase,
        mode=Mode.REMOTE,
        orchestration=Orchestration.PREFILL_FIRST,
        model="tiny",
        prompt_tokens=asked.prompt_tokens,
        sampling=asked.sampling,
        arrived_ms=T0,
        deadline_ms=asked.deadline_ms,
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
    """Tokens of r1, one character each, between those of another stream."""
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
    """r1 was placed remotely, prefill first, and completed with five tokens."""
    asked = request("r1", tokens=100, **changes)
    told: list[Any] = [PLACED, HANDED, PREFILL, DECODE, COMPUTED, RECEIVED, ENDED, *FRAMES]
    return tell([asked], told)["r1"]


def shown(story: Story) -> str:
    out = io.StringIO()
    show(story, Console(file=out, width=160, highlight=False))
    return out.getvalue()


def test_the_steps_of_a_remote_request_in_order() -> None:
    steps = steps_of(remote())
    assert [(step.after_ms, step.who) for step in steps] == [
        (0, "gateway-a"),
        (4, "router-a"),
        (5, "router-a"),
        (27, "prefill-0"),
        (28, "prefill-0"),
        (30, "router-a"),
        (31, "router-a"),
        (36, "decode-0"),
        (99, "decode-0"),
        (100, "decode-0"),
    ]
    told = [step.what for step in steps]
    assert told[0] == "accepted, 100 prompt tokens, at most 16 new"
    assert told[1] == "place remote on prefill-0 and decode-0, prefill_first: learned (learned)"
    assert told[4] == "prefill done: 64 tokens computed, 36 cached, 20 ms"
    assert steps[4].took_ms == 20
    assert steps[6].details == ("KV of 100 tokens from prefill-0 (2 blocks, once)",)
    assert told[7] == "kv received: 2,000,000 bytes over NIXL in 4.0 ms, 500 MB/s"
    assert told[8] == "5 tokens in 3 frames, TPOT 18.00 ms"
    assert told[9] == "completed (length): 5 tokens"


def test_an_outcome_follows_the_frame_that_it_waited_for() -> None:
    story = remote()
    story.outcome = replace(ENDED, ended_ms=T0 + 97)  # the engine was done, its frame not gone yet
    steps = steps_of(story)[-2:]
    assert [(step.after_ms, step.kind) for step in steps] == [(99, "tokens"), (99, "outcome")]
    story.outcome = replace(ENDED, ended_ms=T0 + 97, written_by="router-a")  # waited for none
    steps = steps_of(story)[-2:]
    assert [(step.after_ms, step.kind) for step in steps] == [(97, "outcome"), (99, "tokens")]


def test_all_tokens_are_on_their_way_no_sooner_than_the_first() -> None:
    """Both of a pair say the first token, and the log need not have their frames by time."""
    story = remote()
    story.rows = [TokenRow(T0 + 52, "prefill-0", 1), TokenRow(T0 + 50, "decode-0", 4)]
    story.outcome = replace(ENDED, ended_ms=T0 + 49)
    steps = steps_of(story)[-3:]
    assert [(step.after_ms, step.who, step.kind) for step in steps] == [
        (52, "prefill-0", "tokens"),
        (52, "decode-0", "tokens"),
        (52, "decode-0", "outcome"),
    ]
    story.rows = [TokenRow(T0 + 50, "decode-0", 5)]
    assert steps_of(story)[-2].what == "5 tokens in 1 frame, TPOT 0.00 ms"


def test_a_decision_tells_what_it_looked_at() -> None:
    details = steps_of(remote())[1].details
    assert details[0] == (
        "waited 4 ms, 3 in the queue, slack 59996 ms, session holds 64 tokens, load 0.50, "
        "weights ttft 0.7, tpot 0.3"
    )
    assert details[1:3] == (
        "expected local: TTFT 80.0 ms, TPOT 11.00 ms; remote: TTFT 60.0 ms, TPOT 10.00 ms",
        "score -0.243 = 0.7 * TTFT gain -0.333 - 0.3 * TPOT loss +0.100 + KV price 0.020; "
        "local above 0; 35 samples",
    )
    assert details[3] == ("→ prefill-0 (prefill): 9 credits, 0 running, 0 tokens ahead, 0 cached")
    assert details[4].startswith("  prefill-1 (prefill): 8 credits, 1 running, 10 tokens ahead")
    assert details[-1] == "  and 2 more"


def test_each_policy_tells_the_terms_of_its_score() -> None:
    def told(placed: Decision) -> tuple[str, ...]:
        return steps_of(tell([request("r1")], [placed])["r1"])[1].details

    assert PLACED.estimate is not None
    stranger = replace(PLACED.estimate, gain_ttft=(60 - 160) / 60)
    assert "would wait behind it" in told(replace(PLACED, estimate=stranger))[3]
    cell = Estimate(score=0.5 * 0.4 - 0.5 * 0.1, samples=12, gain_ttft=0.4, loss_tpot=0.1)
    tabled = decision(4, policy="table", reason=Reason.TABLE, w_ttft=0.5, w_tpot=0.5)
    assert told(replace(tabled, estimate=cell)) == (
        "weights ttft 0.5, tpot 0.5",
        "score +0.150 = 0.5 * TTFT gain +0.400 - 0.5 * TPOT loss +0.100; local above 0; 12 samples",
    )


def test_a_worker_is_marked_in_the_role_for_which_it_was_chosen() -> None:
    roles = (Role.PREFILL, Role.DECODE, Role.REPLICA)
    looked_at = [
        Candidate(worker_id="both", role=role, credits=1, running=0, work_ahead_tokens=0)
        for role in roles
    ]
    for prefill, decode, marks in (("both", "other", "→  "), ("other", "both", "→→ ")):
        placed = decision(4, candidates=looked_at, prefill_worker=prefill, decode_worker=decode)
        details = steps_of(tell([request("r1")], [placed])["r1"])[1].details
        assert "".join(detail[0] for detail in details) == marks


def test_one_worker_is_named_once() -> None:
    ended = outcome(DECODE, mode=Mode.LOCAL, orchestration=Orchestration.NONE)
    ended = replace(ended, prefill_worker="decode-0")
    text = shown(tell([request("r1")], [ended])["r1"])
    assert "\nlocal: decode-0, 0 bytes of KV over NIXL" in text


def test_one_screen() -> None:
    text = shown(remote(w_ttft=1.0, w_tpot=0.0, tenant="abc", turn=1))
    lines = text.splitlines()
    assert lines[0] == "r1: completed in 100 ms, attempt 1"
    assert "chat, class standard, tenant abc, session s-r1, turn 2, arrived 1970-01-01" in lines[1]
    assert lines[2].endswith("deadline after 60,000 ms, its own weights: ttft 1, tpot 0")
    assert lines[3] == (
        "remote prefill_first: prefill-0 → decode-0, 2.0 MB of KV over NIXL; TTFT 27 ms, "
        "TPOT 18.00 ms, 5 tokens"
    )
    assert len(lines) < 40
    assert any("━●" in line and "prefill done" in line for line in lines)
    assert any("█" in line and "5 tokens in 3 frames" in line for line in lines)
    assert max(map(len, lines)) <= 160


def test_a_request_that_runs_or_waits_still_has_a_story() -> None:
    story = tell([request("r1")], [])["r1"]
    assert (story.ttft_ms, story.tpot_ms, story.kv_bytes) == (None, None, 0)
    text = shown(story)
    assert "no outcome on the log yet" in text
    assert "placed nowhere; no tokens" in text
    assert "weights of its class or the deployment" in text


def test_tokens_are_counted_once_whatever_repeats_them() -> None:
    frames = [
        frame("decode-0", 20, 1, 2),  # before the first token, which has another producer
        frame("prefill-0", 25, 0, 1),
        frame("decode-0", 30, 0, 2),
        frame("decode-1", 60, 0, 4, attempts=[1, 2]),
        frame("decode-0", 70, 3, 9),  # of an attempt that was given up
    ]
    story = tell([request("r1")], frames)["r1"]
    assert story.token_ids == [0, 1, 2, 3]
    assert [(row.at_ms - T0, row.worker_id, row.tokens) for row in story.rows] == [
        (25, "prefill-0", 3),
        (60, "decode-1", 1),
    ]
    assert story.repeated_rows == 2
    assert "2 repeated rows dropped" in steps_of(story)[-1].what


def test_an_attempt_that_says_something_else_is_told_by_the_gateways_rule() -> None:
    """(issue 10, 8)"""
    frames = [
        frame("decode-0", 20, 0, 3),
        frame("decode-1", 60, 0, 4, attempts=[1, 2], token_ids=[7, 7, 0, 9, 9, 9]),
    ]
    story = tell([request("r1")], frames)["r1"]
    assert (story.token_ids, story.differs_at) == ([0, 1, 2], 1)
    assert "repeated otherwise from token 1 on" in steps_of(story)[-1].what


def test_failures_cancellations_and_paired_orchestrations() -> None:
    paired: dict[str, Any] = {"orchestration": Orchestration.DECODE_FIRST}
    target = replace(KV, worker_id="decode-0", tokens=32, block_ids=(1, 2, 3))
    decode, prefill = replace(DECODE, **paired, kv=None), replace(PREFILL, **paired)
    broke = WireError(code="engine_failed", message="it broke", retriable=True)
    records = [
        decode,
        phase(decode, PhaseKind.KV_ALLOCATED, T0 + 7, kv=target),
        replace(prefill, kv_target=target),
        replace(
            phase(prefill, PhaseKind.PREFILL_DONE, T0 + 20, kv_bytes=500, transfer_ms=1.0),
            kv_read_bytes=700,
        ),
        phase(decode, PhaseKind.KV_RECEIVED, T0 + 21, kv_bytes=500, transfer_ms=1.0),
        phase(decode, PhaseKind.FAILED, T0 + 22, error=broke),
        CancelWork(request_id="r1", attempt=1, worker_id="prefill-0", at_ms=T0 + 23, void=True),
        *(resumption("r1", "g-b", T0), cancellation("r1", tenant="another", at_ms=T0 + 35)),
        cancellation("r1", at_ms=T0 + 40),
        outcome(decode, T0 + 50, kind=OutcomeKind.FAILED, finish_reason="", error=broke),
    ]
    story = tell([request("r1")], records)["r1"]
    assert story.kv_bytes == 1_200  # both ends tell of the same bytes, and prefill of what it read
    told = " | ".join(line for step in steps_of(story) for line in (step.what, *step.details))
    for words in (
        "kv allocated: 3 blocks, of which 32 tokens are held already",
        "KV goes to decode-0, which holds 32 tokens of it",
        "failed: it broke (engine_failed, retriable)",
        "told prefill-0 to stop (void: no outcome)",
        "answer resumed here",
        "cancellation: client_request (by another tenant: without effect) | cancellation: client",
        "failed: 16 tokens; engine_failed: it broke",
    ):
        assert words in told


def test_json_holds_everything_but_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(as_json_value(remote()))
    found = json.loads(capsys.readouterr().out)
    assert found["request"]["prompt_tokens"] == 100
    assert found["work"][1]["kv"]["worker_id"] == "prefill-0"
    assert found["decisions"][0]["estimate"]["kv_price"] == 0.02
    assert len(found["decisions"][0]["candidates"]) == 8
    assert found["tokens"]["rows"] == [[27, "prefill-0", 1], [50, "decode-0", 2]] + [
        [99, "decode-0", 2]
    ]
    assert (found["tokens"]["ttft_ms"], found["tokens"]["tpot_ms"]) == (27, 18)
    assert found["outcome"]["kind"] == "completed"
    assert found["kv_bytes"] == 2_000_000
    assert found["steps"][0]["what"].startswith("accepted")


NOW_MS = 1_790_000_000_000


def stored(*ids: str, arrived_ms: int = NOW_MS - 1_000) -> FakeLog:
    """A log with these requests."""
    log = FakeLog()
    for request_id in ids:
        one = request(request_id, arrived_ms=arrived_ms)
        log.add("requests", partition_of(one.session_id, 4), arrived_ms + 5, one)
    return log


async def find(log: FakeLog, name: str, *, since_ms: int = HOUR_MS) -> str:
    found = await find_request(log, LOG, name, since_ms=since_ms, now_ms=NOW_MS)
    return found.request_id


def test_an_id_tells_when_its_call_arrived() -> None:
    request_id = new_request_id(NOW_MS)
    assert arrival_of(request_id) == arrival_of(request_id[:11]) == (NOW_MS, NOW_MS)
    first, last = arrival_of(request_id[:7]) or (0, 0)
    assert first <= NOW_MS <= last < first + 32**4
    for name in ("r", "", "x" + request_id[1:], "rUPPER", "r1-il"):
        assert arrival_of(name) is None
    window = Window(NOW_MS - CLOCKS_MS, NOW_MS + ACCEPT_MS)
    assert window_of(request_id, HOUR_MS, NOW_MS + 5 * HOUR_MS) == window
    for name in ("mine", "rzzzzzzzzzz"):  # the second tells of the year 10 889
        assert window_of(name, HOUR_MS, NOW_MS) == Window(NOW_MS - HOUR_MS, NOW_MS + CLOCKS_MS)


async def test_an_old_request_is_found_where_its_id_says() -> None:
    request_id = new_request_id(NOW_MS - 9 * HOUR_MS)
    log = stored(request_id, arrived_ms=NOW_MS - 9 * HOUR_MS)
    for name in (request_id, "chatcmpl-" + request_id, "cmpl-" + request_id, request_id[:14]):
        assert await find(log, name) == request_id
    topic, partitions, window = log.asked[0]
    assert (topic, partitions) == ("requests", (0, 1, 2, 3))
    assert window.until_ms - window.since_ms == CLOCKS_MS + ACCEPT_MS


async def test_a_beginning_is_enough_where_only_one_request_has_it() -> None:
    log = stored("call-a", "call-a-b", "call-b0", "call-b1")
    assert await find(log, "call-a") == "call-a"  # the whole id of one, a beginning of another
    assert await find(log, "call-a-") == "call-a-b"
    with pytest.raises(NotFound, match=r"2 requests begin so: call-b0, call-b1; name one"):
        await find(log, "call-b")
    with pytest.raises(NotFound, match=r"4 requests begin so: .* name one"):
        await find(log, "call")
    with pytest.raises(NotFound, match="expected at least 4 characters"):
        await find(log, "cal")


async def test_what_is_not_there_says_where_was_looked_and_what_to_try() -> None:
    log = stored("call-a")
    with pytest.raises(NotFound, match=r"requests at .* from 2026-.* UTC; try `--since 24h`"):
        await find(log, "call-z")
    with pytest.raises(NotFound, match="call-a: no such request"):
        await find(log, "call-a", since_ms=500)
    old = new_request_id(NOW_MS - 30 * HOUR_MS)
    with pytest.raises(NotFound, match="the id says .* requests are kept for 24 h.*--bootstrap"):
        await find(log, old)


async def test_only_what_belongs_to_the_request_is_read() -> None:
    log, asked = FakeLog(), request("r1", tokens=100, gateway_partition=3)
    session = partition_of(asked.session_id, 4)
    log.add("outcomes", session, T0 + 100, ENDED)
    log.add("outcomes", session, T0 + 200, replace(ENDED, kind=OutcomeKind.FAILED))
    log.add("decisions", session, T0 + 4, PLACED)
    log.add("decisions", session, T0 + 4, replace(PLACED, request_id="r1-0"))
    log.add("phases", session, T0 + 36, RECEIVED)
    log.add("prefill", 1, T0 + 5, PREFILL)
    log.add("decode", 0, T0 + 31, DECODE)
    for one in FRAMES:
        log.add("tokens", 3, one.at_ms, one)
    log.add("tokens", 2, T0 + 27, frame("elsewhere", 27, 0, 9))
    story = await collect(log, LOG, asked)
    assert story.outcome == ENDED
    assert (story.decisions, story.phases, story.work) == ([PLACED], [RECEIVED], [PREFILL, DECODE])
    assert story.token_ids == [0, 1, 2, 3, 4]
    windows = {topic: (partitions, window) for topic, partitions, window in log.asked}
    assert windows["tokens"] == ((3,), Window(T0 - CLOCKS_MS, T0 + 100 + CLOCKS_MS))
    assert windows["decisions"][0] == (session,)
    assert windows["prefill"][0] == (0, 1)
    assert windows["outcomes"][1].until_ms > T0 + 10 * HOUR_MS  # to the end


def test_durations() -> None:
    assert [duration_ms(text) for text in ("90s", "30m", "2h", "1d")] == [
        90_000,
        1_800_000,
        7_200_000,
        86_400_000,
    ]
    for text in ("", "2", "0h", "-1h", "1w", "1.5h"):
        with pytest.raises(ConfigError, match="--since: expected a duration such as 90s"):
            duration_ms(text)


def test_stages_of_phases_are_all_told() -> None:
    """No kind of phase breaks the story."""
    for kind in PhaseKind:
        bare: Phase = replace(phase(PREFILL, kind), kv=None, error=None)
        story = tell([request("r1")], [bare])["r1"]
        assert steps_of(story)[1].what.startswith(kind.value.replace("_", " "))
