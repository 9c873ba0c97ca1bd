"""What a story tells of a search: what came of it, and what of that stands in the prompt."""

import json
from dataclasses import replace
from typing import Any

from infra.story.screen import as_json_value
from infra.story.steps import StoryStep, steps_of
from infra.story.story import Story, build_stories
from schemas.errors import DeadlineExceeded
from schemas.records import Insert, Probes, Quoted, Retrieved, WarmPrefix, WorkPhase
from schemas.rules.tokens import pack_tokens
from tests.infra.story.story_records import work
from tests.streams.builders import (
    T0,
    outcome,
    passage,
    probing,
    request,
    retrieval,
    retrieved,
)


def story_of(*answers: Retrieved, **changes: Any) -> Story:
    search_request = request("r1", retrieval=retrieval(T0 + 400, **changes))
    return build_stories([search_request], list(answers))["r1"]


def search_of(story: Story) -> StoryStep:
    (search_step,) = [step for step in steps_of(story) if step.kind == "retrieval"]
    return search_step


def search_result(*passages: Any, **changes: Any) -> Retrieved:
    return retrieved(
        "r1", *passages, asked_ms=T0 + 5, at_ms=T0 + 95, shards=3, missing=(2,), extends=12,
        distances_computed=3_400, embedded_ms=21.5, wait_ms=3.0, took_ms=14.25, mode="hybrid",
        **changes,
    )  # fmt: skip


def test_search_step_shows_times_passages_and_tokens() -> None:
    history = (Insert(at=1, tokens=pack_tokens([71, 72])),)
    answer = search_result(passage(1), passage(2, 60), passage(3, title=""), history=history)
    story = story_of(answer, room_tokens=90)
    assert steps_of(story)[0].what.endswith("wants 2 passages of handbook by 400 ms")
    step = search_of(story)
    assert (step.after_ms, step.took_ms, step.who) == (95, 90, "router-a")
    assert step.what == "found 3 passages (hybrid), 90 ms after asking"
    assert step.details == (
        "searched handbook for: when does the ferry leave",
        "embedded in 21.5 ms; 2 of 3 shards in 14.2 ms, of that 3.0 ms waited for a slot; "
        "12 extends, 3,400 distances",
        "without shards 2, which did not answer",
        "→ d1#0, title 1: score 1.000, 3 tokens",
        "  d2#0, title 2: score 0.500, 60 tokens, not inserted",
        "→ d3#0: score 0.333, 3 tokens",
        "13 tokens inserted into the prompt, 2 of them as in earlier turns",
    )


def test_search_step_explains_late_search() -> None:
    error = DeadlineExceeded("r1: nothing was found in time").to_wire()
    late = retrieved("r1", error=error, asked_ms=T0, at_ms=T0 + 505, shards=0)
    step = search_of(story_of(late, search_result(passage(1))))
    assert step.what == (
        "continues without passages: r1: nothing was found in time (deadline_exceeded)"
    )
    assert step.after_ms == 505 and step.details == (
        "searched handbook for: when does the ferry leave",
        "1 later results had no effect",
    )


def test_search_step_reports_empty_and_degraded_results() -> None:
    question = "where  is\nthe " + "very " * 20 + "old pier"
    step = search_of(
        story_of(replace(search_result(), degraded="no embedding worker"), query=question)
    )
    assert step.what == "found no passages (hybrid), 90 ms after asking"
    assert step.details[0].startswith("searched handbook for: where is the very")
    assert step.details[0].endswith("...") and len(step.details[0]) < 90
    assert step.details[1] == "by its words alone: no embedding worker"
    assert "tokens put" not in step.details[-1]


def test_request_without_retrieval_has_no_search_details() -> None:
    story = build_stories([request("r1")], [search_result(passage(1))])["r1"]
    assert "wants" not in steps_of(story)[0].what
    assert search_of(story).details == ()


def test_story_json_counts_tokens_of_searches() -> None:
    history = (Insert(at=1, tokens=pack_tokens([71, 72])),)
    value = json.loads(
        json.dumps(as_json_value(story_of(search_result(passage(1), history=history))))
    )
    assert value["retrieved"][0]["passages"][0]["tokens"] == 3
    assert value["retrieved"][0]["history"] == [[1, 2]]
    assert value["request"]["retrieval"]["tail"] == 2


def test_search_step_reports_omitted_quotes_of_earlier_turns() -> None:
    quoted = tuple(Quoted(document_id=name, content="x") for name in ("d8", "d9"))
    history = (Insert(at=1, tokens=pack_tokens([71, 72]), quoted=quoted),)
    changed = search_result(passage(1), history=history, changed=("d9", "d7"))
    (line,) = [
        detail
        for detail in search_of(story_of(changed, room_tokens=90)).details
        if "quoted" in detail
    ]
    assert line == "what earlier turns quoted is left out where it changed: d9"
    failed = search_result(history=history, error=DeadlineExceeded("late").to_wire())
    assert "what earlier turns quoted of 2 documents is left out: there was no search" in (
        search_of(story_of(failed, room_tokens=90)).details
    )
    same = search_result(passage(1), history=history)
    assert not any(
        "quoted" in detail for detail in search_of(story_of(same, room_tokens=90)).details
    )


def test_search_step_reports_prefix_warming() -> None:
    search_request = request("r1", retrieval=retrieval(T0 + 400))
    warm = WarmPrefix(
        request_id="r1", session_id="s", worker_id="p0", worker_epoch=1, model="tiny",
        prompt_tokens=pack_tokens([1, 2, 3]), deadline_ms=T0 + 400,
    )  # fmt: skip
    story = build_stories([search_request], [warm, search_result(passage(1))])["r1"]
    line = "p0 was told to compute the first 3 tokens meanwhile"
    assert search_of(story).details[-1] == line
    value = json.loads(json.dumps(as_json_value(story)))
    assert value["warms"][0]["prompt_tokens"] == 3


# Probes


def probe(number: int, *passages: Any, **changes: Any) -> Retrieved:
    tokens = b"".join(hit.tokens for hit in passages)
    where = {"probe": number, "seq": 32 * number, "tokens": tokens, "attempt": 1}
    return replace(search_result(*passages), **{**where, **changes})


def probes_of(*answers: Retrieved, **changes: Any) -> list[StoryStep]:
    story = story_of(*answers, probing=probing(probes_max=4), **changes)
    assert "and at most 4 probes while answering" in steps_of(story)[0].what
    return [step for step in steps_of(story) if step.kind == "probe"]


def test_probe_step_shows_place_wait_work_and_stall() -> None:
    first, second = probes_of(
        search_result(passage(1)), probe(1, passage(3), stalled_ms=12.25), probe(2, attempt=2)
    )
    assert (first.after_ms, first.took_ms, first.who) == (95, 90, "router-a")
    assert first.what == "probe 1, 3 tokens inserted before token 32"
    assert first.details == (
        "embedded in 21.5 ms; 2 of 3 shards in 14.2 ms, of that 3.0 ms waited for a slot; "
        "12 extends, 3,400 distances",
        "decoding paused for 12.2 ms",
        "→ d3#0, title 3: score 0.333, 3 tokens",
    )
    assert second.what == "probe 2, nothing new before token 64 (attempt 2)"
    assert second.details[1:] == ("decoding continued",)


def test_failed_probe_explains_error_and_is_no_prompt_result() -> None:
    error = DeadlineExceeded("late").to_wire()
    (step,) = probes_of(probe(1, error=error, shards=0, stalled_ms=200.0))
    why = "late (deadline_exceeded)"
    assert step.what == f"probe 1, before token 32: continues without passages: {why}"
    assert step.details == ("decoding paused for 200.0 ms",)
    story = story_of(search_result(passage(1)), probe(1), probe(2))
    assert not any("later answers" in line for line in search_of(story).details)


def test_later_attempt_and_outcome_count_probe_inserts() -> None:
    search_request = request("r1", retrieval=retrieval(T0 + 400, probing=probing()))
    inserts = (Insert(at=8, tokens=pack_tokens([71, 72])), Insert(at=16, tokens=b""))
    assert search_request.retrieval is not None
    second_attempt = replace(
        work(WorkPhase.DECODE, "w1", T0 + 100, attempt=2),
        probes=Probes(retrieval=search_request.retrieval, inserts=inserts, decided=3),
    )
    final_outcome = replace(
        outcome(second_attempt, T0 + 900), probes=3, retrieved_tokens=2, stalled_ms=40.4
    )
    story = build_stories([search_request], [second_attempt, final_outcome])["r1"]
    steps_by_kind = {step.kind: step for step in steps_of(story)}
    assert steps_by_kind["work"].details == (
        "what 1 of 3 probes of earlier attempts put in goes in again",
    )
    assert steps_by_kind["outcome"].what.endswith(
        ", 3 probes put in 2 more and stalled it for 40 ms"
    )
    value = json.loads(json.dumps(as_json_value(story)))
    assert value["work"][0]["probes"]["inserts"][0]["tokens"] == 2
    assert value["request"]["retrieval"]["probing"]["lead"] == 0
