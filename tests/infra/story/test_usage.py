"""Sums of what requests have used, and what is wrong with numbers."""

from dataclasses import replace

from infra.story.usage import Check, Sums
from schemas.records import OutcomeKind, Priority, Usage

ONE = Usage(
    number=7,
    request_id="r1",
    parent_id="r1",
    session_id="s1",
    tenant="a",
    kind=OutcomeKind.COMPLETED,
    prompt_tokens=10,
    cached_tokens=4,
    retrieved_tokens=3,
    completion_tokens=5,
    reasoning_tokens=2,
    worker_ms=500.0,
    ended_ms=1_785_000_000_000,
)


def test_usage_sums_group_by_columns_and_total() -> None:
    sums = Sums(["tenant", "class"])
    for usage in (
        ONE,
        replace(ONE, kind=OutcomeKind.SHED, completion_tokens=0),
        replace(ONE, tenant="b", priority=Priority.BATCH),
    ):
        sums.add(usage)
    assert sums.rows() == [
        {
            **{"tenant": "a", "class": "standard", "requests": 2, "completed": 1},
            **{"prompt_tokens": 20, "cached_tokens": 8, "retrieved_tokens": 6},
            **{"completion_tokens": 5, "reasoning_tokens": 4, "worker_s": 1.0},
        },
        {
            **{"tenant": "b", "class": "batch", "requests": 1, "completed": 1},
            **{"prompt_tokens": 10, "cached_tokens": 4, "retrieved_tokens": 3},
            **{"completion_tokens": 5, "reasoning_tokens": 2, "worker_s": 0.5},
        },
    ]
    assert (sums.total.requests, sums.total.completion_tokens) == (3, 10)


def test_usage_hour_is_hour_of_request_end() -> None:
    sums = Sums(["hour"])
    sums.add(ONE)
    assert [row["hour"] for row in sums.rows()] == ["2026-07-25T17:00Z"]


def test_usage_check_reports_gaps_and_repeated_numbers() -> None:
    check = Check()
    check.add(0, ONE)
    check.add(1, replace(ONE, number=0, request_id="r2"))
    check.add(0, replace(ONE, number=8, request_id="r3"))
    assert check.holds
    check.add(0, replace(ONE, number=10, request_id="r4"))
    check.add(0, replace(ONE, number=10, request_id="r5"))
    check.add(1, replace(ONE, number=1))
    assert check.gaps == ["partition 0: number 10 where 9 was expected"]
    assert check.repeats == [
        "partition 0: number 10 again, of r5",
        "partition 1: number 1 is of r1, which has one",
    ]
    assert not check.holds
