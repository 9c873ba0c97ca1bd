"""Links of new rows are never in the way of a search."""

from typing import Any

import pytest

from workers.vector.engine.queues import QueuedSearch
from workers.vector.engine.scheduler import Running, SchedulerSettings, SearchScheduler
from workers.vector.index.kinds import SearchKind

LINK = Running(slot=4, kind=SearchKind.LINK, extends_left=500)


def scheduler() -> SearchScheduler:
    """With one link in a place, which is all there are."""
    to = SearchScheduler(SchedulerSettings(ms_per_extend=1, park_after_ms=1_000))
    arrive(to, SearchKind.LINK, "link")
    assert names(to.plan(0, 1, 9).admit) == ["link"]
    return to


def arrive(to: SearchScheduler, kind: SearchKind, name: str) -> None:
    assert to.arrive(QueuedSearch(kind=kind, extends=9, arrived_ms=0, search=name), 0) is None


def names(items: list[QueuedSearch]) -> list[Any]:
    return [item.search for item in items]


@pytest.mark.parametrize("kind", [SearchKind.PREFILL, SearchKind.DECODE])
def test_scheduler_parks_link_for_search_at_once(kind: SearchKind) -> None:
    to = scheduler()
    arrive(to, kind, "search")
    plan = to.plan(0, 0, 9, [LINK])
    assert (plan.park, names(plan.admit)) == ([4], ["search"])


def test_scheduler_keeps_link_with_free_place_or_without_slot() -> None:
    for places, slots in ((1, 9), (0, 0)):
        to = scheduler()
        arrive(to, SearchKind.DECODE, "search")
        assert to.plan(0, places, slots, [LINK]).park == []


def test_scheduler_resumes_parked_link_last_and_parks_once() -> None:
    to = scheduler()
    for name in ("one", "two"):
        arrive(to, SearchKind.DECODE, name)
    plan = to.plan(0, 0, 9, [LINK])
    assert (plan.park, names(plan.admit)) == ([4], ["one"])
    parked = Running(slot=4, kind=SearchKind.LINK, extends_left=500, may_park=False)
    plan = to.plan(1, 1, 9, [], [parked])
    assert (plan.resume, names(plan.admit)) == ([], ["two"])
    assert to.plan(2, 1, 9, [], [parked]).resume == [4]
    arrive(to, SearchKind.DECODE, "three")
    assert to.plan(3, 0, 9, [parked]).park == []


def test_scheduler_admits_links_after_all_others() -> None:
    to = SearchScheduler(SchedulerSettings(share=0.5))
    arrive(to, SearchKind.LINK, "link")
    for kind in (SearchKind.DECODE, SearchKind.PREFILL):
        arrive(to, kind, kind)
    assert names(to.plan(0, 2, 9).admit) == ["prefill", "decode"]
    assert names(to.plan(0, 2, 9).admit) == ["link"]
