"""Admission: order, ageing, bounds, expiry; by cases and against a slow model."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.records import Priority
from streams.core.requests.admission import CLASSES, Admission

AGEING_MS = 1_000


def admission(**changes: Any) -> Admission:
    limits = {"requests_max": 1_000, "tokens_max": 1_000_000, "ageing_ms": AGEING_MS}
    return Admission(**{**limits, **changes})


def arrive(queue: Admission, request_id: str, now_ms: int = 0, **changes: Any) -> list[str]:
    base: dict[str, Any] = {
        "level": CLASSES[Priority.STANDARD],
        "tokens": 10,
        "work_ms": 100,
        "deadline_ms": 60_000,
        "since_ms": now_ms,
    }
    return queue.arrive(request_id, now_ms=now_ms, **{**base, **changes})


def order(queue: Admission, now_ms: int = 0) -> list[str]:
    found = []
    while (request_id := queue.head(now_ms)) is not None:
        queue.remove(request_id)
        found.append(request_id)
    return found


def test_serves_by_class_then_by_slack_then_by_arrival() -> None:
    queue = admission()
    arrive(queue, "batch", level=2, deadline_ms=1_000)
    arrive(queue, "standard", level=1)
    arrive(queue, "interactive-late", level=0, deadline_ms=50_000)
    arrive(queue, "interactive-soon", level=0, deadline_ms=40_000)
    arrive(queue, "interactive-long", level=0, deadline_ms=50_000, work_ms=20_000)
    arrive(queue, "interactive-late-2", level=0, deadline_ms=50_000)
    assert order(queue) == [
        "interactive-long",
        "interactive-soon",
        "interactive-late",
        "interactive-late-2",
        "standard",
        "batch",
    ]


@pytest.mark.parametrize(
    ("level", "waited_ms", "expected"),
    [
        (2, 0, 2),
        (2, 999, 2),
        (2, 1_000, 1),
        (2, 2_000, 0),
        (2, 9_000, 0),
        (1, 999, 1),
        (1, 1_000, 0),
    ],
)
@pytest.mark.parametrize("arrives_late", [False, True])
def test_waiting_raises_the_class(
    level: int, waited_ms: int, expected: int, arrives_late: bool
) -> None:
    """Shown by what is served before it, of one younger request per class with less slack."""
    queue = admission()
    arrive(queue, "r", waited_ms if arrives_late else 0, level=level, since_ms=0)
    for other in range(3):
        arrive(queue, f"younger-{other}", waited_ms, level=other, deadline_ms=70_000)
    assert order(queue, waited_ms).index("r") == expected


def test_batch_is_served_before_younger_interactive_requests_in_the_end() -> None:
    queue = admission()
    arrive(queue, "batch", level=2, deadline_ms=30_000)
    for number in range(50):
        now_ms = number * 1_000
        if queue.head(now_ms) == "batch":
            return
        arrive(queue, f"i{number}", now_ms, level=0, deadline_ms=now_ms + 10_000)
        queue.remove(queue.head(now_ms) or "")
    raise AssertionError("batch starved")


@pytest.mark.parametrize("limits", [{"requests_max": 2}, {"tokens_max": 25}])
def test_sheds_the_worst_and_not_the_newest(limits: dict[str, int]) -> None:
    queue = admission(**limits)
    arrive(queue, "batch", level=2)
    arrive(queue, "standard", level=1)
    assert arrive(queue, "interactive", level=0) == ["batch"]
    assert arrive(queue, "batch-2", level=2) == ["batch-2"]
    assert order(queue) == ["interactive", "standard"]


def test_of_equals_the_newest_is_shed() -> None:
    queue = admission(requests_max=2)
    assert [arrive(queue, request_id) for request_id in "abc"] == [[], [], ["c"]]


def test_one_request_is_never_too_large_for_an_empty_queue() -> None:
    queue = admission(tokens_max=5)
    assert arrive(queue, "large", tokens=100) == []
    assert arrive(queue, "small", tokens=1, deadline_ms=1) == ["large"]


def test_expires_by_deadline_and_forgets() -> None:
    queue = admission()
    arrive(queue, "late", deadline_ms=300)
    arrive(queue, "soon", deadline_ms=200)
    arrive(queue, "gone", deadline_ms=100)
    assert queue.remove("gone")
    assert not queue.remove("gone")
    assert queue.expire(199) == []
    assert queue.expire(300) == ["soon", "late"]
    assert (len(queue), queue.tokens, queue.head(300)) == (0, 0, None)


def test_memory_follows_the_length() -> None:
    queue = admission()
    for number in range(5_000):
        arrive(queue, f"r{number}", level=number % 3, deadline_ms=60_000 + number)
        queue.remove(f"r{number - 3}")
    entries = sum(len(q.front) + len(q.back) for q in queue._classes)
    assert entries + len(queue._deadlines) + len(queue._rises) < 500


def test_whoever_stays_while_others_leave_keeps_its_place() -> None:
    """Also when all heaps are made anew without those that have left."""
    queue = admission()
    stays = [(f"{level}{number}", level) for level in range(3) for number in range(3)]
    for request_id, level in stays:
        arrive(queue, request_id, level=level, deadline_ms=60_000 + int(request_id))
    for number in range(300):
        arrive(queue, f"r{number}", level=number % 3)
        queue.remove(f"r{number}")
    queue.requests_max = len(stays)
    assert arrive(queue, "new", level=0, deadline_ms=1) == ["22"], "the worst of them"
    assert order(queue) == ["new", *(request_id for request_id, _ in stays[:-1])]


@dataclass
class Item:
    request_id: str
    level: int
    key_ms: int
    seq: int
    tokens: int
    deadline_ms: int
    since_ms: int

    def rank(self, now_ms: int) -> tuple[int, int, int]:
        risen = max(0, now_ms - self.since_ms) // AGEING_MS
        return max(0, self.level - risen), self.key_ms, self.seq


class Model:
    """The same, by sorting everything each time."""

    def __init__(self, requests_max: int, tokens_max: int) -> None:
        self.limits = requests_max, tokens_max
        self.items: dict[str, Item] = {}

    def sorted(self, now_ms: int) -> list[str]:
        return sorted(self.items, key=lambda r: self.items[r].rank(now_ms))

    def arrive(self, item: Item, now_ms: int) -> list[str]:
        self.items[item.request_id] = item
        shed = []
        while len(self.items) > 1 and (
            len(self.items) > self.limits[0]
            or sum(i.tokens for i in self.items.values()) > self.limits[1]
        ):
            shed.append(self.sorted(now_ms)[-1])
            del self.items[shed[-1]]
        return shed


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "serve", "cancel", "expire"]),
        st.integers(0, 700),  # time passes
        st.integers(0, 2),
        st.integers(1, 40),
        st.integers(0, 5_000),
    ),
    max_size=120,
)


@settings(max_examples=150)
@given(STEPS, st.integers(1, 12), st.integers(1, 200))
def test_equals_the_slow_model(
    steps: list[tuple[str, int, int, int, int]], requests_max: int, tokens_max: int
) -> None:
    queue = admission(requests_max=requests_max, tokens_max=tokens_max)
    model, now_ms = Model(requests_max, tokens_max), 0
    for seq, (step, passed_ms, level, tokens, ahead_ms) in enumerate(steps, start=1):
        now_ms += passed_ms
        if step == "arrive":
            since_ms = now_ms - ahead_ms // 4
            item = Item(
                f"r{seq}", level, now_ms + ahead_ms, seq, tokens, now_ms + ahead_ms, since_ms
            )
            shed = queue.arrive(
                item.request_id,
                level=level,
                tokens=tokens,
                work_ms=0,
                deadline_ms=item.deadline_ms,
                since_ms=since_ms,
                now_ms=now_ms,
            )
            assert shed == model.arrive(item, now_ms)
        elif step == "serve" and model.items:
            head = queue.head(now_ms)
            assert head == model.sorted(now_ms)[0]
            assert queue.remove(head) and model.items.pop(head)
        elif step == "cancel" and model.items:
            victim = sorted(model.items)[tokens % len(model.items)]
            assert queue.remove(victim) and model.items.pop(victim)
        elif step == "expire":
            due = [r for r, i in model.items.items() if i.deadline_ms <= now_ms]
            assert sorted(queue.expire(now_ms)) == sorted(due)
            for request_id in due:
                del model.items[request_id]
        assert len(queue) == len(model.items) and all(r in queue for r in model.items)
        assert queue.tokens == sum(i.tokens for i in model.items.values())
