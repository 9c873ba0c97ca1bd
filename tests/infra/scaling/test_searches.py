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
    record = replace(registration(name), roles=[Role.RETRIEVAL], search=capability)
    return Member(registration=record, seen_ms=T0, state=MemberState.READY, search=load)


class Pools:
    """Measure one worker, second by second."""

    def __init__(self) -> None:
        self._searches, self._answered, self._second = RetrievalMeter(), 0, 0

    def second(self, answered: int, *, answering: float, name: str = "s0") -> PoolLoad:
        self._answered, self._second = self._answered + answered, self._second + 1
        load = SearchLoad(answering=answering, searches_total=self._answered)
        now = replace(searcher(name, load), seen_ms=T0 + 1_000 * self._second)
        (pool,) = self._searches.measure([now], 1_000.0)
        return pool


def test_fleet_meter_counts_searches_by_shard() -> None:
    view = FleetView()
    router_says(view, backlog())
    for number, running in enumerate((3, 5, 1)):
        load = SearchLoad(running=running, waiting_prefill=1, waiting_decode=2)
        member = searcher(f"s{number}", load, shard=number % 2, shards=2)
        view.apply(replace(member.registration, leases=[]), number, T0)
        view.apply(replace(beat(f"s{number}", 1, {}, at_ms=T0), search=load), 10, T0)
    measurement = FleetMeter().measure(view, T0)
    assert measurement is not None
    assert [(p.present, p.under_way, p.slots) for p in measurement.shards] == [
        (2, 10, 4),
        (1, 8, 4),
    ]


@pytest.mark.parametrize(
    ("load", "under_way"),
    [
        (SearchLoad(running=3, waiting_prefill=1, waiting_decode=2), 6),  # of an older release
        (SearchLoad(running=1, answering=2.5), 2.5),  # the rest is on the way
        (SearchLoad(running=1, answering=2.5, unread=40), 42.5),
    ],
)
def test_retrieval_meter_counts_unread_requests(load: SearchLoad, under_way: float) -> None:
    """A worker that is busy taking records holds few, however many are unread."""
    (pool,) = RetrievalMeter().measure([searcher("s0", load)], 1_000.0)
    assert pool.under_way == under_way


def test_retrieval_meter_learns_pace_of_saturated_worker() -> None:
    pools = Pools()
    for _ in range(5):
        assert pools.second(100, answering=3.0).pace_per_s == 0, "it could do more"
    pools.second(300, answering=30.0)
    for _ in range(5):
        pool = pools.second(400, answering=50.0)
    assert pool.pace_per_s == pytest.approx(400)
    for _ in range(int(6 * MEMORY_MS / 1_000)):
        pool = pools.second(200, answering=1.0)
    assert pool.pace_per_s == pytest.approx(400) and pool.per_s == pytest.approx(200, rel=0.02)


def test_retrieval_meter_excludes_missed_searches_from_pace() -> None:
    searches = RetrievalMeter()
    for second in range(5):
        load = SearchLoad(unread=90, searches_total=1_000 * second, misses_total=900 * second)
        late = replace(searcher("s0", load), seen_ms=T0 + 1_000 * second)
        (pool,) = searches.measure([late], 1_000.0)
    assert pool.pace_per_s == pytest.approx(100)


def test_retrieval_meter_restarts_counts_at_new_epoch() -> None:
    searches = RetrievalMeter()
    busy = searcher("s0", SearchLoad(answering=9.0, searches_total=500))
    searches.measure([busy], 1_000.0)
    next_registration = replace(busy.registration, epoch=busy.registration.epoch + 1)
    load = SearchLoad(answering=9.0, searches_total=20)
    new = replace(busy, registration=next_registration, seen_ms=T0 + 1_000, search=load)
    (pool,) = searches.measure([new], 1_000.0)
    assert (pool.per_s, pool.pace_per_s) == (0, 0)
    assert searches.measure([], 1_000.0) == ()


def test_retrieval_meter_ignores_worker_without_new_heartbeat() -> None:
    searches = RetrievalMeter()
    busy = searcher("s0", SearchLoad(answering=9.0, searches_total=500))
    for _ in range(3):
        (pool,) = searches.measure([busy], 1_000.0)
    assert (pool.per_s, pool.pace_per_s) == (0, 0)
