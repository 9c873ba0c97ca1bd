"""Admission: order, ageing, bounds, expiry; by cases and against a slow model."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.records import Priority
from streams.core.requests.admission import AGEING_MS, CLASSES, Admission


def admission(**changes: Any) -> Admission:
    limits = {"requests_max": 1_000, "tokens_max": 1_000_000}
    return Admission(**{**limits, **changes})


def arrive(queue: Admission, request_id: str, now_ms: int = 0, **changes: Any) -> list[str]:
    base: dict[str, Any] = {
        "tenant": "",
        "level": CLASSES[Priority.STANDARD],
        "tokens": 10,
        "work_ms": 100,
        "deadline_ms": 60_000,
        "since_ms": now_ms,
    }
    return queue.arrive(request_id, now_ms=now_ms, **{**base, **changes})


def order(queue: Admission, now_ms: int = 0) -> list[str]:
    request_ids = []
    while (request_id := queue.head(now_ms)) is not None:
        queue.remove(request_id)
        request_ids.append(request_id)
    return request_ids


def test_admission_serves_by_class_then_slack_then_arrival() -> None:
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
        (2, AGEING_MS - 1, 2),
        (2, AGEING_MS, 1),
        (2, 2 * AGEING_MS, 0),
        (2, 9 * AGEING_MS, 0),
        (1, AGEING_MS - 1, 1),
        (1, AGEING_MS, 0),
    ],
)
@pytest.mark.parametrize("arrives_late", [False, True])
def test_admission_raises_class_of_waiting_request(
    level: int, waited_ms: int, expected: int, arrives_late: bool
) -> None:
    """The test counts younger requests with less slack that are served before it."""
    queue = admission()
    arrive(queue, "r", waited_ms if arrives_late else 0, level=level, since_ms=0)
    for younger_level in range(3):
        arrive(
            queue, f"younger-{younger_level}", waited_ms, level=younger_level, deadline_ms=70_000
        )
    assert order(queue, waited_ms).index("r") == expected


def test_admission_finally_serves_batch_before_interactive() -> None:
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
def test_admission_sheds_worst_request_and_not_newest(limits: dict[str, int]) -> None:
    queue = admission(**limits)
    arrive(queue, "batch", level=2)
    arrive(queue, "standard", level=1)
    assert arrive(queue, "interactive", level=0) == ["batch"]
    assert arrive(queue, "batch-2", level=2) == ["batch-2"]
    assert order(queue) == ["interactive", "standard"]


def test_admission_sheds_newest_of_equal_requests() -> None:
    queue = admission(requests_max=2)
    assert [arrive(queue, request_id) for request_id in "abc"] == [[], [], ["c"]]


def test_admission_accepts_oversized_request_into_empty_queue() -> None:
    queue = admission(tokens_max=5)
    assert arrive(queue, "large", tokens=100) == []
    assert arrive(queue, "small", tokens=1, deadline_ms=1) == ["large"]


def test_admission_expires_by_deadline_and_forgets_requests() -> None:
    queue = admission()
    arrive(queue, "late", deadline_ms=300)
    arrive(queue, "soon", deadline_ms=200)
    arrive(queue, "gone", deadline_ms=100)
    assert queue.remove("gone")
    assert not queue.remove("gone")
    assert queue.expire(199) == []
    assert queue.expire(300) == ["soon", "late"]
    assert (len(queue), queue.tokens, queue.head(300)) == (0, 0, None)


def test_admission_memory_follows_its_length() -> None:
    queue = admission()
    for number in range(5_000):
        arrive(queue, f"r{number}", level=number % 3, deadline_ms=60_000 + number)
        queue.remove(f"r{number - 3}")
    queues = [
        tenant_queue
        for queue_class in queue._classes
        for tenant_queue in queue_class.queues.values()
    ]
    entries = sum(len(tenant_queue.front) + len(tenant_queue.back) for tenant_queue in queues)
    assert entries + len(queue._deadlines) + len(queue._rises) < 500


def test_request_keeps_its_place_while_others_leave() -> None:
    """This holds when all heaps are rebuilt without the requests that have left."""
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


def test_admission_serves_other_tenants_during_flood() -> None:
    queue = admission()
    for number in range(100):
        arrive(queue, f"a{number}", tenant="a", deadline_ms=1_000)
    serve(queue)
    arrive(queue, "b", tenant="b", deadline_ms=500_000)
    assert serve(queue) == "b"


def test_idle_tenant_saves_up_no_share() -> None:
    queue = admission()
    for number in range(100):
        arrive(queue, f"a{number}", tenant="a")
    for _ in range(50):
        serve(queue)
    for number in range(10):
        arrive(queue, f"b{number}", tenant="b")
    assert Counter(serve(queue)[0] for _ in range(10)) == {"a": 5, "b": 5}


def test_answer_tokens_count_twice_against_their_tenant() -> None:
    queue = admission()
    queue.count_answer("a", 25)
    for number in range(10):
        arrive(queue, f"a{number}", tenant="a")
        arrive(queue, f"b{number}", tenant="b")
    assert [serve(queue)[0] for _ in range(8)] == [*"bbbbb", *"aba"]


def test_admission_prefers_class_to_fair_share() -> None:
    queue = admission()
    queue.count_answer("a", 1_000)
    arrive(queue, "b", tenant="b", level=1)
    arrive(queue, "a", tenant="a", level=0)
    assert order(queue) == ["a", "b"]


def test_admission_sheds_request_of_tenant_with_most_tokens() -> None:
    queue = admission(tokens_max=100)
    for number in range(9):
        arrive(queue, f"a{number}", tenant="a")
    assert arrive(queue, "b", tenant="b", deadline_ms=500_000) == []
    assert arrive(queue, "b2", tenant="b", deadline_ms=500_000) == ["a8"]


def test_admission_forgets_tenants_without_requests() -> None:
    queue = admission()
    for number in range(25_000):
        arrive(queue, "r", tenant=f"t{number}")
        serve(queue)
    arrive(queue, "stays", tenant="s")
    assert len(queue._tenants) <= 10_001


def serve(queue: Admission, now_ms: int = 0) -> str:
    request_id = queue.head(now_ms)
    assert request_id is not None
    queue.serve(request_id)
    return request_id


@dataclass
class Item:
    request_id: str
    tenant: str
    level: int
    key_ms: int
    seq: int
    tokens: int
    deadline_ms: int
    since_ms: int

    def risen(self, now_ms: int) -> int:
        return max(0, self.level - max(0, now_ms - self.since_ms) // AGEING_MS)


class Model:
    """The same, by looking at everything each time; of equals it names all."""

    def __init__(self, requests_max: int, tokens_max: int) -> None:
        self.limits = requests_max, tokens_max
        self.items: dict[str, Item] = {}
        self.served: Counter[str] = Counter()
        self.served_last = 0

    def of_class(self, best: bool, now_ms: int) -> dict[str, list[Item]]:
        """Who waits in the best or the worst class, by tenant, each in order."""
        levels = [entry.risen(now_ms) for entry in self.items.values()]
        level = min(levels) if best else max(levels)
        by_tenant: dict[str, list[Item]] = defaultdict(list)
        for entry in sorted(self.items.values(), key=lambda entry: (entry.key_ms, entry.seq)):
            if entry.risen(now_ms) == level:
                by_tenant[entry.tenant].append(entry)
        return by_tenant

    def heads(self, now_ms: int) -> set[str]:
        by_tenant = self.of_class(True, now_ms)
        least_served = min(self.served[tenant] for tenant in by_tenant)
        return {
            items[0].request_id for t, items in by_tenant.items() if self.served[t] == least_served
        }

    def lift(self, tenant: str) -> None:
        if all(entry.tenant != tenant for entry in self.items.values()):
            self.served[tenant] = max(self.served[tenant], self.served_last)

    def arrive(self, item: Item) -> None:
        self.lift(item.tenant)
        self.items[item.request_id] = item

    def is_full(self) -> bool:
        tokens = sum(entry.tokens for entry in self.items.values())
        return len(self.items) > 1 and (len(self.items) > self.limits[0] or tokens > self.limits[1])

    def worst(self, now_ms: int) -> set[str]:
        by_tenant = self.of_class(False, now_ms)
        tokens = {tenant: sum(i.tokens for i in items) for tenant, items in by_tenant.items()}
        most_tokens = max(tokens.values())
        return {items[-1].request_id for t, items in by_tenant.items() if tokens[t] == most_tokens}

    def serve(self, request_id: str) -> None:
        item = self.items.pop(request_id)
        self.served_last = max(self.served_last, self.served[item.tenant])
        self.served[item.tenant] += item.tokens

    def answered(self, tenant: str, tokens: int) -> None:
        self.lift(tenant)
        self.served[tenant] += 2 * tokens


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "arrive", "serve", "cancel", "expire", "answered"]),
        st.sampled_from("abc"),
        st.integers(0, 3_500),  # time passes
        st.integers(0, 2),
        st.integers(1, 40),
        st.integers(0, 25_000),
    ),
    max_size=120,
)


@settings(max_examples=200)
@given(STEPS, st.sampled_from(["a", "abc"]), st.integers(1, 12), st.integers(1, 200))
def test_admission_matches_slow_model(
    steps: list[tuple[str, str, int, int, int, int]],
    tenants: str,
    requests_max: int,
    tokens_max: int,
) -> None:
    queue = admission(requests_max=requests_max, tokens_max=tokens_max)
    model, now_ms = Model(requests_max, tokens_max), 0
    for seq, (step, tenant, passed_ms, level, tokens, ahead_ms) in enumerate(steps, start=1):
        now_ms += passed_ms
        tenant = tenant if tenant in tenants else tenants
        if step == "arrive":
            ends_ms, since_ms = now_ms + ahead_ms, now_ms - ahead_ms // 4
            item = Item(f"r{seq}", tenant, level, ends_ms, seq, tokens, ends_ms, since_ms)
            model.arrive(item)
            shed = arrive(
                queue,
                item.request_id,
                now_ms,
                tenant=tenant,
                level=level,
                tokens=tokens,
                work_ms=0,
                deadline_ms=item.deadline_ms,
                since_ms=since_ms,
            )
            for request_id in shed:
                assert model.is_full() and request_id in model.worst(now_ms)
                del model.items[request_id]
            assert not model.is_full()
        elif step == "serve" and model.items:
            assert queue.head(now_ms) in model.heads(now_ms)
            model.serve(serve(queue, now_ms))
        elif step == "cancel" and model.items:
            victim = sorted(model.items)[tokens % len(model.items)]
            assert queue.remove(victim) and model.items.pop(victim)
        elif step == "expire":
            due = [r for r, i in model.items.items() if i.deadline_ms <= now_ms]
            assert sorted(queue.expire(now_ms)) == sorted(due)
            for request_id in due:
                del model.items[request_id]
        elif step == "answered":
            queue.count_answer(tenant, tokens)
            model.answered(tenant, tokens)
        assert len(queue) == len(model.items) and all(r in queue for r in model.items)
        assert queue.tokens == sum(i.tokens for i in model.items.values())
