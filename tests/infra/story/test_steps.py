"""The steps of a request's story: their order, and what each tells."""

from dataclasses import replace
from typing import Any

from infra.story.steps import steps_of
from infra.story.story import TokenRow, build_stories
from schemas.records import (
    AnswerDelta,
    CancelWork,
    Candidate,
    Decision,
    DeltaKind,
    Estimate,
    Mode,
    Orchestration,
    OutcomeKind,
    Parsing,
    Phase,
    PhaseKind,
    Reason,
    Role,
    StreamDeltas,
    WireError,
)
from tests.infra.story.story_records import (
    DECODE,
    ENDED,
    KV,
    PLACED,
    PREFILL,
    decision,
    frame,
    remote,
    render_story,
)
from tests.streams.builders import T0, cancellation, outcome, phase, request, resumption
from tests.streams.gateway.samples import stream_end


def test_steps_of_remote_request_are_in_time_order() -> None:
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
    texts = [step.what for step in steps]
    assert texts[0] == "accepted, 100 prompt tokens, at most 16 new"
    assert texts[1] == "place remote on prefill-0 and decode-0, prefill_first: learned (learned)"
    assert texts[4] == "prefill done: 64 tokens computed, 36 cached, 20 ms"
    assert steps[4].took_ms == 20
    assert steps[6].details == ("KV of 100 tokens from prefill-0 (2 blocks, once)",)
    assert texts[7] == "kv received: 2,000,000 bytes over NIXL in 4.0 ms, 500 MB/s"
    assert texts[8] == "5 tokens in 3 frames, TPOT 18.00 ms"
    assert texts[9] == "completed (length): 5 tokens"


def test_outcome_step_follows_awaited_token_frame() -> None:
    story = remote()
    story.outcome = replace(ENDED, ended_ms=T0 + 97)  # the engine was done, its frame not gone yet
    steps = steps_of(story)[-2:]
    assert [(step.after_ms, step.kind) for step in steps] == [(99, "tokens"), (99, "outcome")]
    story.outcome = replace(ENDED, ended_ms=T0 + 97, written_by="router-a")  # waited for none
    steps = steps_of(story)[-2:]
    assert [(step.after_ms, step.kind) for step in steps] == [(97, "outcome"), (99, "tokens")]


def test_token_steps_never_precede_first_token() -> None:
    """Both workers of a pair send the first token, and their frames may come unordered."""
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


def test_decision_step_shows_inputs_and_candidates() -> None:
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


def test_decision_step_shows_score_terms_of_policy() -> None:
    def details_of(placed: Decision) -> tuple[str, ...]:
        return steps_of(build_stories([request("r1")], [placed])["r1"])[1].details

    assert PLACED.estimate is not None
    stranger = replace(PLACED.estimate, gain_ttft=(60 - 160) / 60)
    assert "would wait behind it" in details_of(replace(PLACED, estimate=stranger))[3]
    cell = Estimate(score=0.5 * 0.4 - 0.5 * 0.1, samples=12, gain_ttft=0.4, loss_tpot=0.1)
    tabled = decision(4, policy="table", reason=Reason.TABLE, w_ttft=0.5, w_tpot=0.5)
    assert details_of(replace(tabled, estimate=cell)) == (
        "weights ttft 0.5, tpot 0.5",
        "score +0.150 = 0.5 * TTFT gain +0.400 - 0.5 * TPOT loss +0.100; local above 0; 12 samples",
    )


def test_decision_step_marks_worker_in_chosen_role() -> None:
    roles = (Role.PREFILL, Role.DECODE, Role.REPLICA)
    looked_at = [
        Candidate(worker_id="both", role=role, credits=1, running=0, work_ahead_tokens=0)
        for role in roles
    ]
    for prefill, decode, marks in (("both", "other", "→  "), ("other", "both", "→→ ")):
        placed = decision(4, candidates=looked_at, prefill_worker=prefill, decode_worker=decode)
        details = steps_of(build_stories([request("r1")], [placed])["r1"])[1].details
        assert "".join(detail[0] for detail in details) == marks


def test_story_names_single_worker_once() -> None:
    local_outcome = outcome(DECODE, mode=Mode.LOCAL, orchestration=Orchestration.NONE)
    local_outcome = replace(local_outcome, prefill_worker="decode-0")
    text = render_story(build_stories([request("r1")], [local_outcome])["r1"])
    assert "\nlocal: decode-0, 0 bytes of KV over NIXL" in text


def test_story_of_unfinished_request_shows_missing_outcome() -> None:
    story = build_stories([request("r1")], [])["r1"]
    assert (story.ttft_ms, story.tpot_ms, story.kv_bytes) == (None, None, 0)
    text = render_story(story)
    assert "no outcome on the log yet" in text
    assert "not placed; no tokens" in text
    assert "weights of its class or the deployment" in text


def test_steps_show_failures_cancellations_and_paired_work() -> None:
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
        phase(decode, PhaseKind.KV_MISSED, T0 + 21, error=broke),
        phase(decode, PhaseKind.FAILED, T0 + 22, error=broke),
        CancelWork(request_id="r1", attempt=1, worker_id="prefill-0", at_ms=T0 + 23, void=True),
        *(resumption("r1", "g-b", T0), cancellation("r1", tenant="another", at_ms=T0 + 35)),
        cancellation("r1", at_ms=T0 + 40),
        outcome(decode, T0 + 50, kind=OutcomeKind.FAILED, finish_reason="", error=broke),
    ]
    story = build_stories([request("r1")], records)["r1"]
    assert story.kv_bytes == 1_200  # both ends tell of the same bytes, and prefill of what it read
    text = " | ".join(line for step in steps_of(story) for line in (step.what, *step.details))
    for words in (
        "kv allocated: 3 blocks, of which 32 tokens are held already",
        "KV goes to decode-0, which holds 32 tokens of it",
        "kv missed: it broke; the prompt is computed here",
        "failed: it broke (engine_failed, retriable)",
        "told prefill-0 to stop (void: no outcome)",
        "answer resumed here",
        "cancellation: client_request (by another tenant: without effect) | cancellation: client",
        "failed: 16 tokens; engine_failed: it broke",
    ):
        assert words in text


def test_steps_cover_every_phase_kind() -> None:
    for kind in PhaseKind:
        bare: Phase = replace(phase(PREFILL, kind), kv=None, error=None)
        story = build_stories([request("r1")], [bare])["r1"]
        assert steps_of(story)[1].what.startswith(kind.value.replace("_", " "))


def test_steps_show_parsed_answer() -> None:
    """Its rows have no text: the story has what the worker's parsers made of its tokens."""
    call: dict[str, Any] = {"kind": DeltaKind.CALL, "index": 0}
    rows = [
        [AnswerDelta(seq=2, kind=DeltaKind.REASONING, text="Look\nit up.")],
        [
            AnswerDelta(seq=3, kind=DeltaKind.CONTENT, text="x" * 200),
            AnswerDelta(seq=4, call_id="c1", name="look", text='{"q":', **call),
        ],
    ]
    frames = [
        frame("decode-0", 20 + 10 * n, 2 * n, 2, first_chars=[0, 0], texts=["xx", ""], deltas=[
            StreamDeltas(request_id="r1", attempt=1, first_seq=2 * n, deltas=deltas)
        ])
        for n, deltas in enumerate(rows)
    ]  # fmt: skip
    end = stream_end("r1", finish_reason="tool_calls", reasoning_tokens=2)
    last = [AnswerDelta(seq=4, text=" 1}", **call)]
    frames.append(frame("decode-0", 50, 4, 0, ends=[replace(end, seq=4, deltas=last)]))
    parsing = Parsing(tools="[]", tool_choice="auto")
    story = build_stories([request("r1", parsing=parsing)], frames)["r1"]
    accepted, _, tokens = steps_of(story)
    assert accepted.what.endswith("tool choice auto")
    assert tokens.details == (
        "reasoning (2 tokens): Look it up.",
        f"content: {'x' * 120}…",
        'calls look (c1): {"q": 1}',
    )
    answer = story.as_dict()["answer"]
    assert (answer["content"], answer["reasoning_tokens"]) == ("x" * 200, 2)
    assert answer["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"q": 1}'}
    assert "calls look (c1)" in render_story(story)
    text = remote().as_dict()["answer"]
    assert (text["content"], text["tool_calls"]) == ("xxxxx", [])
