"""A request's story, put together from its records."""

from infra.story.steps import steps_of
from infra.story.story import build_stories
from tests.infra.story.story_records import frame
from tests.streams.builders import T0, request


def test_story_counts_repeated_tokens_once() -> None:
    frames = [
        frame("decode-0", 20, 1, 2),  # before the first token, which has another producer
        frame("prefill-0", 25, 0, 1),
        frame("decode-0", 30, 0, 2),
        frame("decode-1", 60, 0, 4, attempts=[1, 2]),
        frame("decode-0", 70, 3, 9),  # of an attempt that was given up
    ]
    story = build_stories([request("r1")], frames)["r1"]
    assert story.token_ids == [0, 1, 2, 3]
    assert [(row.at_ms - T0, row.worker_id, row.tokens) for row in story.rows] == [
        (25, "prefill-0", 3),
        (60, "decode-1", 1),
    ]
    assert story.repeated_rows == 2
    assert "2 repeated rows dropped" in steps_of(story)[-1].what


def test_story_reports_first_divergent_token() -> None:
    frames = [
        frame("decode-0", 20, 0, 3),
        frame("decode-1", 60, 0, 4, attempts=[1, 2], token_ids=[7, 7, 0, 9, 9, 9]),
    ]
    story = build_stories([request("r1")], frames)["r1"]
    assert (story.token_ids, story.differs_at) == ([0, 1, 2], 1)
    assert "repeated otherwise from token 1 on" in steps_of(story)[-1].what
