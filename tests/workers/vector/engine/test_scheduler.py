"""The scheduler as a pure function, with a clock of its own."""

import math
from collections.abc import Iterator, Sequence, Sized

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ConfigError
from workers.vector.engine.queues import QueuedSearch
from workers.vector.engine.scheduler import Drop, Plan, Running, SchedulerSettings, SearchScheduler
from workers.vector.index.kinds import SearchKind


def scheduler(**settings: float) -> SearchScheduler:
    defaults = {"ms_per_extend": 1.0, "park_after_ms": 5.0, "share": 0.5}
    return SearchScheduler(SchedulerSettings(**{**defaults, **settings}))  # type: ignore[arg-type]


def arrive(
    to: SearchScheduler,
    kind: SearchKind,
    name: str,
    *,
    at_ms: float = 0,
    extends: int = 10,
    by_ms: float = 1e6,
) -> QueuedSearch:
    item = QueuedSearch(
        kind=kind, extends=extends, arrived_ms=at_ms, deadline_ms=by_ms, search=name
    )
    assert to.arrive(item, at_ms) is None
    return item


def prefill(to: SearchScheduler, name: str, by_ms: float = 1e6, extends: int = 10) -> QueuedSearch:
    return arrive(to, SearchKind.PREFILL, name, extends=extends, by_ms=by_ms)


def decode(to: SearchScheduler, name: str) -> QueuedSearch:
    return arrive(to, SearchKind.DECODE, name)


def names(plan: Plan) -> list[str]:
    return [item.search for item in plan.admit]


def test_scheduler_admits_least_slack_first() -> None:
    to = scheduler()
    prefill(to, "early deadline, short", by_ms=100, extends=10)
    prefill(to, "later deadline, long", by_ms=150, extends=90)
    prefill(to, "same length, later", by_ms=151, extends=90)
    expected = ["later deadline, long", "same length, later", "early deadline, short"]
    assert names(to.plan(0, 3, 3)) == expected


def test_scheduler_slack_follows_measured_extend_time() -> None:
    to = scheduler(ms_per_extend=0.001)
    prefill(to, "short", by_ms=100, extends=10)
    prefill(to, "long", by_ms=150, extends=90)
    for _ in range(100):
        to.add_measurement(1.0)
    assert names(to.plan(0, 1, 1)) == ["long"]


def test_scheduler_admits_decode_in_arrival_order() -> None:
    to = scheduler()
    for i in range(5):
        decode(to, str(i))
    assert names(to.plan(0, 3, 9)) == ["0", "1", "2"]
    assert names(to.plan(0, 3, 9)) == ["3", "4"]


@pytest.mark.parametrize(("share", "places", "expected"), [(0.5, 4, 2), (0.3, 5, 2), (0.9, 4, 3)])
def test_scheduler_reserves_share_of_places_for_prefill(
    share: float, places: int, expected: int
) -> None:
    to = scheduler(share=share)
    for i in range(10):
        prefill(to, f"p{i}")
        decode(to, f"d{i}")
    admitted = names(to.plan(0, places, 20))
    assert sum(name[0] == "p" for name in admitted) == expected
    assert len(admitted) == places


def test_scheduler_gives_unused_places_to_other_class() -> None:
    to = scheduler(share=0.5)
    prefill(to, "p")
    for i in range(9):
        decode(to, f"d{i}")
    assert len(to.plan(0, 8, 20).admit) == 8
    to = scheduler(share=0.1)
    decode(to, "d")
    for i in range(9):
        prefill(to, f"p{i}")
    assert len(to.plan(0, 8, 20).admit) == 8


def test_scheduler_shares_single_places_over_time() -> None:
    to = scheduler(share=0.75)
    for i in range(40):
        prefill(to, f"p{i}")
        decode(to, f"d{i}")
    admitted = [names(to.plan(0, 1, 5))[0][0] for _ in range(40)]
    assert admitted.count("d") == 10
    assert "pppp" not in "".join(admitted)


def test_scheduler_admits_hopeless_searches_last() -> None:
    to = scheduler()
    prefill(to, "hopeless", by_ms=5, extends=10)
    prefill(to, "feasible", by_ms=50, extends=10)
    decode(to, "decode")
    assert names(to.plan(0, 3, 3)) == ["feasible", "decode", "hopeless"]


def test_scheduler_drops_hopeless_searches_when_configured() -> None:
    to = scheduler(drops_late=True)
    item = prefill(to, "hopeless", by_ms=5, extends=10)
    plan = to.plan(0, 3, 3)
    assert plan.dropped == [(item, Drop.TOO_LATE)] and not plan.admit and not len(to)


def test_scheduler_drops_searches_after_deadline() -> None:
    to = scheduler()
    late, late_decode = prefill(to, "p", by_ms=20), arrive(to, SearchKind.DECODE, "d", by_ms=20)
    plan = to.plan(30, 4, 4)
    assert {item.search for item, _ in plan.dropped} == {"p", "d"}
    assert {why for _, why in plan.dropped} == {Drop.DEADLINE_PASSED}
    assert not plan.admit and not len(to) and not late.waits and not late_decode.waits
    late_search = QueuedSearch(kind=SearchKind.DECODE, extends=1, arrived_ms=9, deadline_ms=9)
    assert to.arrive(late_search, 9) is Drop.DEADLINE_PASSED


def test_scheduler_drops_search_at_deadline_behind_others() -> None:
    to = scheduler()
    first, brief, last = (
        arrive(to, SearchKind.DECODE, name, by_ms=by_ms)
        for name, by_ms in (("first", 1e6), ("brief", 20), ("last", 1e6))
    )
    plan = to.plan(19, 0, 9)
    assert not plan.dropped and plan.wake_ms == 20
    plan = to.plan(20, 0, 9)
    assert plan.dropped == [(brief, Drop.DEADLINE_PASSED)] and plan.wake_ms == 1e6
    assert to.plan(21, 9, 9).admit == [first, last] and not len(to)


def test_scheduler_forgets_cancelled_searches() -> None:
    """Many are cancelled while nothing is admitted."""
    to = scheduler(queue_max=10)
    stays = decode(to, "stays")
    for i in range(1_000):
        for item in (prefill(to, "p", by_ms=1e5, extends=i % 7), decode(to, "d")):
            to.queues.cancel(item)
    queues: list[Sized] = [
        to.queues.decode,
        to.queues._deadlines,
        *to.queues.prefill._heaps.values(),
    ]
    entries_count = sum(len(queue) for queue in queues)
    assert entries_count < 500
    assert to.plan(0, 9, 9).admit == [stays]
    decode(to, "waits"), prefill(to, "too")
    assert {item.search for item in to.queues.drain()} == {"waits", "too"} and not len(to)


def test_scheduler_bounds_queues_by_class() -> None:
    to = scheduler(queue_max=2)
    for _ in range(2):
        decode(to, "d")
    assert (
        to.arrive(QueuedSearch(kind=SearchKind.DECODE, extends=1, arrived_ms=0), 0)
        is Drop.QUEUE_FULL
    )
    prefill(to, "p")


@given(
    kind=st.sampled_from(SearchKind), by_ms=st.sampled_from([0.0, 5.0, 1e6]),
    gather_min=st.sampled_from([1, 2]), drops_late=st.booleans(), waiting_count=st.integers(0, 1),
    places=st.integers(1, 3),
)  # fmt: skip
def test_scheduler_admits_at_once_like_plan(
    kind: SearchKind,
    by_ms: float,
    gather_min: int,
    drops_late: bool,
    waiting_count: int,
    places: int,
) -> None:
    to = scheduler(gather_min=gather_min, drops_late=drops_late)
    for _ in range(waiting_count):
        decode(to, "another")
    item = QueuedSearch(kind=kind, extends=10, arrived_ms=0, deadline_ms=by_ms, search="it")
    passes = to.admits_at_once(item)
    may_pass = gather_min == 1 and not drops_late and kind is not SearchKind.LINK and by_ms > 0
    assert passes == (may_pass and not waiting_count)
    if passes:
        assert to.arrive(item, 0) is None
        assert to.plan(0, places, places) == Plan(admit=[item])


def test_scheduler_plan_omits_cancelled_searches() -> None:
    to = scheduler()
    items = [prefill(to, "p"), decode(to, "d"), arrive(to, SearchKind.LINK, "l")]
    for item in items:
        to.queues.cancel(item)
    plan = to.plan(0, 9, 9)
    assert not plan.admit and not plan.dropped and not len(to)


def running(
    slots: int, kind: SearchKind = SearchKind.DECODE, extends_left: int = 50
) -> list[Running]:
    return [
        Running(slot=slot, kind=kind, extends_left=extends_left + slot) for slot in range(slots)
    ]


def test_scheduler_parks_longest_decode_for_urgent_prefill() -> None:
    to = scheduler()
    prefill(to, "urgent", by_ms=40, extends=10)
    plan = to.plan(0, 0, 3, running(3))
    assert (plan.park, names(plan)) == ([2], ["urgent"])


def test_scheduler_parks_links_first_and_prefill_never() -> None:
    to = scheduler()
    for i in range(4):
        prefill(to, f"p{i}", by_ms=20 + i)
    mixed = [
        Running(slot=0, kind=SearchKind.PREFILL, extends_left=99),
        Running(slot=1, kind=SearchKind.DECODE, extends_left=99),
        Running(slot=2, kind=SearchKind.LINK, extends_left=30),
        Running(slot=3, kind=SearchKind.DECODE, extends_left=99, may_park=False),
    ]
    assert to.plan(0, 0, 9, mixed).park == [2, 1]


def test_scheduler_parks_decode_for_prefill_after_wait() -> None:
    to = scheduler(park_after_ms=5)
    prefill(to, "patient")
    plan = to.plan(4, 0, 3, running(3, extends_left=1))
    assert not plan.park and plan.wake_ms == 5
    assert to.plan(5, 0, 3, running(3, extends_left=1)).park == [2]


@pytest.mark.parametrize("slots", [0, 1])
def test_scheduler_parks_only_with_free_slots(slots: int) -> None:
    to = scheduler()
    for i in range(3):
        prefill(to, f"p{i}", by_ms=30)
    assert len(to.plan(0, 0, slots, running(3)).park) == slots


def test_scheduler_resumes_parked_before_new_decode() -> None:
    to = scheduler()
    decode(to, "new")
    plan = to.plan(0, 1, 3, parked=[Running(slot=7, kind=SearchKind.DECODE, extends_left=3)])
    assert plan.resume == [7] and not plan.admit


def test_scheduler_gathers_until_timeouts() -> None:
    to = scheduler(gather_min=4, flush_ms=5, global_flush_ms=20)
    decode(to, "d")
    assert to.plan(0, 8, 8).wake_ms == 20
    prefill(to, "p")
    assert to.plan(1, 8, 8).wake_ms == 5
    assert sorted(names(to.plan(5, 8, 8))) == ["d", "p"]
    for i in range(4):
        decode(to, str(i))
    assert len(to.plan(6, 8, 8).admit) == 4


Arrivals = st.lists(
    st.tuples(st.sampled_from(list(SearchKind)), st.integers(1, 30), st.integers(1, 200)),
    max_size=40,
)


@given(Arrivals, st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20)), max_size=30), st.data())
def test_scheduler_loses_no_search_and_keeps_reserved_places(
    arrivals: Sequence[tuple[SearchKind, int, int]],
    turns: Sequence[tuple[int, int]],
    data: st.DataObject,
) -> None:
    share = data.draw(st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]))
    to = scheduler(share=share)
    items = [
        QueuedSearch(kind=kind, extends=extends, arrived_ms=0, deadline_ms=by_ms, search=i)
        for i, (kind, extends, by_ms) in enumerate(arrivals)
    ]
    for item in items:
        assert to.arrive(item, 0) is None
    now_ms, ended_ids, last_decode = 0, set[int](), -1
    for places, later_ms in turns:
        now_ms += later_ms
        feasible = sum(
            i.kind is SearchKind.PREFILL and i.slack_ms(now_ms, 1.0) >= 0 and i.deadline_ms > now_ms
            for i in items
            if i.search not in ended_ids
        )
        plan = to.plan(now_ms, places, 99)
        ended_searches = plan.admit + [item for item, _ in plan.dropped]
        assert not ended_ids & {item.search for item in ended_searches}
        ended_ids |= {item.search for item in ended_searches}
        admitted_decodes = [i.search for i in plan.admit if i.kind is SearchKind.DECODE]
        assert admitted_decodes == sorted(admitted_decodes)
        assert not admitted_decodes or admitted_decodes[0] > last_decode
        last_decode = admitted_decodes[-1] if admitted_decodes else last_decode
        prefills = sum(item.kind is SearchKind.PREFILL for item in plan.admit)
        if places > 1:
            assert prefills >= min(feasible, math.ceil(share * places), places - 1)
        waiting = sum(i.deadline_ms > now_ms for i in items if i.search not in ended_ids)
        assert len(plan.admit) == places or waiting == 0
    assert len(to) == len(items) - len(ended_ids)


def test_scheduler_settings_reject_wrong_values() -> None:
    with pytest.raises(ConfigError, match="search.share: expected at most 1, found 2"):
        SchedulerSettings(share=2)
    with pytest.raises(ConfigError, match="search.queue_max: expected at least 1, found 0"):
        SchedulerSettings(queue_max=0)
    with pytest.raises(ConfigError, match="flush_ms: expected at most global_flush_ms .4.,"):
        SchedulerSettings(global_flush_ms=4)


@pytest.mark.parametrize("extends_most", [40, 1 << 60])
def test_scheduler_inspects_running_searches_only_for_urgent_ones(extends_most: int) -> None:
    to, looked = scheduler(ms_per_extend=0.5), list[float]()
    prefill(to, "urgent at last", by_ms=100)

    def running(now_ms: float) -> Iterator[Running]:
        looked.append(now_ms)
        yield Running(slot=3, kind=SearchKind.DECODE, extends_left=40)

    for now_ms in (0.0, 4.0):
        plan = to.plan(now_ms, 0, 1, running(now_ms), max_extends=lambda: extends_most)
        assert (plan.park, names(plan), plan.wake_ms) == ([], [], 5.0)
    plan = to.plan(5.0, 0, 1, running(5.0), max_extends=lambda: extends_most)
    assert (plan.park, names(plan)) == ([3], ["urgent at last"])
    assert looked == ([5.0] if extends_most == 40 else [0.0, 4.0, 5.0])


@pytest.mark.parametrize(
    ("kind", "by_ms", "until_ms"),
    [
        (SearchKind.DECODE, math.inf, math.inf),  # it waits for a place
        (SearchKind.DECODE, 30, 30),  # it is dropped then
        (SearchKind.PREFILL, 100, 5),  # it takes a place then
        (SearchKind.PREFILL, 24, 0),  # it may have to at once
        (SearchKind.PREFILL, 4, 0),  # it is late
    ],
)
def test_scheduler_predicts_idle_time_without_free_place(
    kind: SearchKind, by_ms: float, until_ms: float
) -> None:
    to = scheduler(ms_per_extend=0.5)
    arrive(to, kind, "asked", extends=10, by_ms=by_ms)
    assert to.idle_until_ms(0.0, lambda: 40) == until_ms
    if until_ms:
        running = [Running(slot=0, kind=SearchKind.DECODE, extends_left=40)]
        early = to.plan(until_ms - 1 if until_ms < math.inf else 1e9, 0, 1, running, (), lambda: 40)
        assert (early.admit, early.park, early.dropped) == ([], [], [])


def test_scheduler_idle_time_ends_when_search_waits_behind_link() -> None:
    to = scheduler()
    arrive(to, SearchKind.LINK, "link")
    assert to.idle_until_ms(0.0, lambda: 20) == 1e6
    assert names(to.plan(0.0, 1, 1)) == ["link"]
    decode(to, "decode")
    assert to.idle_until_ms(0.0, lambda: 20) == 0.0
