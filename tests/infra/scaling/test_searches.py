"""What the shards of the retrieval pool have to do."""

from dataclasses import replace

import pytest

from infra.scaling.ewma import MEMORY_MS
from infra.scaling.fleet_meter import FleetMeter
from infra.scaling.pools import PoolLoad
from infra.scaling.searches import RetrievalMeter
from schemas.fleet import FleetView, Member
from schemas.records import MemberState, Role, SearchCapability, SearchLoad
from tests.infra.scaling.samples import backlog, router_says
from tests.streams.builders import T0, beat, registration


def searcher(name: str, load: SearchLoad, *, shard: int = 0, shards: int = 1) -> Member:
    capability = SearchCapability(shard=shard, shards=shards, backend="cpu", slots=4)
    one = replace(registration(name), roles=[Role.RETRIEVAL], search=capability)
    return Member(registration=one, seen_ms=T0, state=MemberState.READY, search=load)


class Pools:
    """Looks at one worker, second by second."""

    def __init__(self) -> None:
        self._searches, self._answered, self._second = RetrievalMeter(), 0, 0

    def second(self, answered: int, *, held: float, name: str = "s0") -> PoolLoad:
        self._answered, self._second = self._answered + answered, self._second + 1
        load = SearchLoad(answering=held, searches_total=self._answered)
        now = replace(searcher(name, load), seen_ms=T0 + 1_000 * self._second)
        (found,) = self._searches.measure([now], 1_000.0)
        return found


def test_searches_are_counted_by_shard() -> None:
    view = FleetView()
    router_says(view, backlog())
    for number, running in enumerate((3, 5, 1)):
        load = SearchLoad(running=running, waiting_prefill=1, waiting_decode=2)
        member = searcher(f"s{number}", load, shard=number % 2, shards=2)
        view.apply(replace(member.registration, leases=[]), number, T0)
        view.apply(replace(beat(f"s{number}", 1, {}, at_ms=T0), search=load), 10, T0)
    found = FleetMeter().measure(view, T0)
    assert found is not None
    assert [(p.present, p.under_way, p.slots) for p in found.shards] == [(2, 10, 4), (1, 8, 4)]


@pytest.mark.parametrize(
    ("load", "held"),
    [
        (SearchLoad(running=3, waiting_prefill=1, waiting_decode=2), 6),  # of an older release
        (SearchLoad(running=1, answering=2.5), 2.5),  # the rest is on the way
        (SearchLoad(running=1, answering=2.5, unread=40), 42.5),
    ],
)
def test_what_lies_on_the_log_counts_too(load: SearchLoad, held: float) -> None:
    """A worker whose time goes into taking records holds few, however many there are."""
    (found,) = RetrievalMeter().measure([searcher("s0", load)], 1_000.0)
    assert found.under_way == held


def test_a_pace_is_what_a_worker_answers_that_has_more_than_it_can_hold() -> None:
    pools = Pools()
    for _ in range(5):
        assert pools.second(100, held=3.0).pace_per_s == 0, "it could do more"
    pools.second(300, held=30.0)
    for _ in range(5):
        found = pools.second(400, held=50.0)
    assert found.pace_per_s == pytest.approx(400)
    for _ in range(int(6 * MEMORY_MS / 1_000)):
        found = pools.second(200, held=1.0)
    assert found.pace_per_s == pytest.approx(400) and found.per_s == pytest.approx(200, rel=0.02)


def test_what_was_refused_because_it_came_too_late_is_no_pace() -> None:
    searches = RetrievalMeter()
    for second in range(5):
        load = SearchLoad(unread=90, searches_total=1_000 * second, misses_total=900 * second)
        late = replace(searcher("s0", load), seen_ms=T0 + 1_000 * second)
        (found,) = searches.measure([late], 1_000.0)
    assert found.pace_per_s == pytest.approx(100)


def test_a_new_life_begins_at_no_searches() -> None:
    searches = RetrievalMeter()
    busy = searcher("s0", SearchLoad(answering=9.0, searches_total=500))
    searches.measure([busy], 1_000.0)
    again = replace(busy.registration, epoch=busy.registration.epoch + 1)
    load = SearchLoad(answering=9.0, searches_total=20)
    new = replace(busy, registration=again, seen_ms=T0 + 1_000, search=load)
    (found,) = searches.measure([new], 1_000.0)
    assert (found.per_s, found.pace_per_s) == (0, 0)
    assert searches.measure([], 1_000.0) == ()


def test_a_worker_that_was_not_heard_of_since_tells_nothing_new() -> None:
    searches = RetrievalMeter()
    busy = searcher("s0", SearchLoad(answering=9.0, searches_total=500))
    for _ in range(3):
        (found,) = searches.measure([busy], 1_000.0)
    assert (found.per_s, found.pace_per_s) == (0, 0)
