"""Parts of a retrieval worker alone: receipts, figures, documents, upkeep, settings."""

import asyncio
import functools
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import pytest

from schemas import retrieval
from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, ConfigError, QueueFull
from schemas.fleet import FleetView
from schemas.records import (
    Capability,
    Document,
    Heartbeat,
    Load,
    MemberKind,
    MemberState,
    Registration,
    Role,
)
from schemas.retrieval import pack_vector
from schemas.settings import LogSettings
from tests.waiting import until
from tests.workers.search.data import gaussian
from workers.search.engine.control import ControlSettings
from workers.search.engine.engine import EngineSettings, SearchEngine
from workers.search.engine.queues import NEVER_MS, Item
from workers.search.engine.scheduler import Scheduler, SchedulerSettings
from workers.search.index import index, ways
from workers.search.index.inputs import Metric
from workers.search.index.query import Kind
from workers.search.service import watchdog, worker
from workers.search.service.collections import Change, Collections
from workers.search.service.fleet_figures import FleetFigures, stalled_share
from workers.search.service.receipts import Receipts
from workers.search.service.settings import (
    DEGREE_MAX,
    METRICS,
    SHARDS_MAX,
    TASKS_MAX,
    TOP_M_MAX,
    RetrievalSettings,
    ShardPlace,
)
from workers.search.service.upkeep import Upkeep
from workers.search.service.watchdog import STALL_MS, Progress
from workers.search.walk import slots


def test_records_are_acknowledged_in_the_order_of_their_partition() -> None:
    acknowledged: list[str] = []
    receipts = Receipts()
    place, other = ("t", 0), ("t", 1)
    first, second, third = (
        receipts.open(place, functools.partial(acknowledged.append, name)) for name in "abc"
    )
    alone = receipts.open(other, lambda: acknowledged.append("x"))
    receipts.close(place, third)
    receipts.close(place, second)
    assert acknowledged == []
    receipts.close(other, alone)
    receipts.close(place, first)
    assert acknowledged == ["x", "a", "b", "c"]


def test_what_was_taken_away_is_not_acknowledged() -> None:
    acknowledged: list[str] = []
    receipts = Receipts()
    before = receipts.open(("t", 0), lambda: acknowledged.append("before"))
    receipts.drop()
    after = receipts.open(("t", 0), lambda: acknowledged.append("after"))
    receipts.close(("t", 0), before)
    assert acknowledged == []
    receipts.close(("t", 0), after)
    assert acknowledged == ["after"]


def beat(name: str, seq: int, at_ms: int, load: Load, epoch: int = 1) -> Heartbeat:
    state = MemberState.READY
    return Heartbeat(member_id=name, epoch=epoch, seq=seq, at_ms=at_ms, state=state, load=load)


def test_kv_per_second_is_summed_over_the_workers_that_live() -> None:
    view, figures = FleetView(), FleetFigures()

    def tell(found: Heartbeat) -> None:
        view.apply(found, 0, found.at_ms)
        figures.fold(found)

    capability = Capability(
        model="m", engine="sim", engine_id="e", block_size=16, max_model_len=9, running_max=4
    )
    for name, able in (("p", capability), ("d", capability), ("r", None)):
        registration = Registration(
            member_id=name,
            epoch=1,
            kind=MemberKind.WORKER,
            roles=(Role.DECODE,),
            started_ms=0,
            capability=able,
        )
        view.apply(registration, 0, 0)
        tell(beat(name, 1, 0, Load(kv_bytes_received=500)))
    assert figures.link_bytes_per_s(view, 0) is None
    assert stalled_share(view, 0) is None
    tell(beat("p", 2, 500, Load(kv_bytes_received=1_500, stalled_share=0.5)))
    tell(beat("d", 2, 1_000, Load(kv_bytes_received=2_500, stalled_share=0.25)))
    tell(beat("r", 2, 1_000, Load(kv_bytes_received=99_999)))
    assert figures.link_bytes_per_s(view, 1_000) == 2_000 + 2_000
    assert stalled_share(view, 1_000) == 0.375
    assert figures.link_bytes_per_s(view, 3_200) == 2_000, "p is lost"
    figures.fold(beat("d", 1, 1_500, Load(kv_bytes_received=0), epoch=2))
    assert figures.link_bytes_per_s(view, 1_500) == 2_000, "d began anew"


def change(name: str, vector: Any, collection: str = "c", **fields: Any) -> Change:
    document = Document(
        document_id=name, collection=collection, vector=pack_vector(vector), at_ms=0, **fields
    )
    return Change(collection, name, document)


def test_one_wrong_document_of_many_is_left_out_alone() -> None:
    held = Collections(RetrievalSettings(collections_max=1))
    wrong = [
        change("short", [1]),
        change("nan", [1, np.nan]),
        change("list", [1, 1], metadata="[1]"),
        change("slash", [1, 1], "a/b"),
        change("second", [1, 1], "d"),
    ]
    good = [change("a", [1, 0]), change("b", [0, 1]), change("a", [1, 1]), Change("c", "b", None)]
    failed = held.apply([good[0], *wrong, *good[1:]])
    assert {each.document_id for each, _ in failed} == {each.document_id for each in wrong}
    (state,) = held.states()
    assert (state.name, state.dim, state.documents) == ("c", 2, 1)
    assert held.apply([Change("nowhere", "x", None)]) == []


async def test_new_rows_are_linked_once_they_rest_and_deleted_ones_compacted() -> None:
    settings = RetrievalSettings(upkeep_interval_ms=1)
    held = Collections(settings)
    rows = gaussian(1_500, 4)
    held.apply([change(str(i), row) for i, row in enumerate(rows)])
    engine = SearchEngine(EngineSettings(lanes=1))
    upkeep = Upkeep(settings, held, engine.neighbours)
    await upkeep.finish()
    index = held.get("c")
    assert index.loose == 0
    held.apply([change(f"new{i}", row) for i, row in enumerate(gaussian(50, 4, seed=1))])
    assert index.loose == 50
    running = asyncio.create_task(upkeep.run())
    await until(lambda: index.loose == 0)
    assert engine.load().searches_total >= 50 / 8, "the engine searched for their neighbours"
    held.apply([Change("c", str(i), None) for i in range(600)])
    await until(lambda: index.rows.count == len(index) == 950)
    running.cancel()
    await engine.close()


async def test_an_engine_that_is_full_is_asked_to_link_again_later() -> None:
    settings = RetrievalSettings(upkeep_interval_ms=1)
    held, refused = Collections(settings), 0
    held.apply([change(str(i), row) for i, row in enumerate(gaussian(1_500, 4))])

    async def full(*_: Any) -> Any:
        nonlocal refused
        refused += 1
        raise QueueFull("expected fewer than 1 waiting searches")

    upkeep = Upkeep(settings, held, full)
    await upkeep.finish()
    held.apply([change("new", [1, 2, 3, 4])])
    running = asyncio.create_task(upkeep.run())
    await until(lambda: refused >= 2)
    assert held.get("c").loose == 1 and not running.done()
    running.cancel()


def test_a_consumer_that_reads_nothing_though_there_is_something_ends_the_worker() -> None:
    progress, place, other = Progress(), ("retrieval.decode", 0), ("retrieval.decode", 1)
    progress.look({place: 100}, {}, 0)
    progress.look({place: 100}, {}, 10 * STALL_MS)  # what was there before is not counted
    progress.look({place: 105}, {place: 103}, 10 * STALL_MS + 1)
    progress.look({place: 105}, {place: 104}, 11 * STALL_MS)  # slow, and alive
    with pytest.raises(BrokerUnavailable, match="1 retrievals to read"):
        progress.look({place: 105}, {place: 104}, 12 * STALL_MS + 1)
    progress.look({other: 7}, {}, 13 * STALL_MS)
    with pytest.raises(BrokerUnavailable, match="2 retrievals to read"):
        progress.look({other: 9}, {}, 14 * STALL_MS + 1)


async def test_a_rebalance_begins_the_count_of_what_was_read_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, end, looks = ("retrieval.decode", 0), 100, 0

    class Broker:
        def __init__(self, **_: Any) -> None:
            self.start = self.stop = functools.partial(asyncio.sleep, 0)

        async def end_offsets(self, places: list[Any]) -> dict[Any, int]:
            nonlocal looks
            looks += 1
            return dict.fromkeys(places, end)

    for name, value in (("AIOKafkaConsumer", Broker), ("STALL_MS", 5), ("_LOOK_S", 0.001)):
        monkeypatch.setattr(watchdog, name, value)
    owned, read = {place}, {place: 100}
    watching = asyncio.create_task(watchdog.watch(LogSettings(), lambda: owned, read))

    async def looked(times: int) -> None:
        before = looks
        await until(lambda: looks >= before + times or watching.done())

    await looked(3)
    end, read[place] = 150, 150
    await looked(20)
    owned = {place}  # assigned again, and nothing comes
    read.clear()
    await looked(50)
    assert not watching.done()
    end = 160
    with pytest.raises(BrokerUnavailable, match="10 retrievals to read"):
        await watching


def test_settings_are_checked() -> None:
    settings = RetrievalSettings(metrics=("a=sqeuclidean",), share=0.25, wait_target_ms=7)
    assert Metric(settings.metric_of("a")) is Metric.SQEUCLIDEAN
    assert Metric(settings.metric_of("b")) is Metric.COSINE
    assert set(METRICS) == {metric.value for metric in Metric}
    assert (DEGREE_MAX, TOP_M_MAX) == (index.DEGREE_MAX, ways.TOP_M_MAX)
    assert (TASKS_MAX, SHARDS_MAX) == (slots.TASKS_MAX, retrieval.SHARDS_MAX)
    assert settings.scheduler().share == 0.25 and settings.control().wait_target_ms == 7
    cases: list[tuple[dict[str, Any], str]] = [
        ({"metrics": ("a=euclid",)}, "collection=metric .* found 'a=euclid'"),
        ({"top_m": 0}, "top_m: expected at least 1"),
        ({"top_m": 513}, "top_m: expected at most 512, found 513"),
        ({"degree": 342}, "degree: expected at most 341, found 342"),
        ({"degree": 64, "width": 65}, "width: expected at most 64 with degree 64, found 65"),
        ({"share": 2.0}, "share: expected at most 1"),
        ({"control_interval_ms": 0}, "control_interval_ms: expected at least 1"),
    ]
    for wrong, said in cases:
        with pytest.raises(ConfigError, match=said):
            RetrievalSettings(**wrong)


def test_a_shard_is_named_by_its_number_and_how_many_there_are() -> None:
    assert ShardPlace.parse("1/3") == ShardPlace(1, 3)
    assert str(ShardPlace(1, 3)) == "1/3"
    for text in ("", "1", "3/3", "-1/2", "a/b", "1/0", "0/1025"):
        with pytest.raises(ConfigError, match="expected SHARD/SHARDS"):
            ShardPlace.parse(text)


def test_every_knob_of_scheduler_and_control_loop_is_a_setting() -> None:
    """Gains, bounds, dead band, slew, places, slots and gathering, from [retrieval] to where they
    act; only what is measured is none (issue 10, 27)."""
    names = {each.name for each in fields(RetrievalSettings)}
    of_scheduler = {each.name for each in fields(SchedulerSettings)} - {"ms_per_extend"}
    of_control = {each.name for each in fields(ControlSettings)} - {"interval_ms"}
    assert of_scheduler | of_control | {"places", "slots", "patience"} <= names
    changed: dict[str, Any] = {
        "share_gain": 0.7, "dead_band": 0.4, "share_step_max": 0.2, "share_max": 0.6,
        "flush_factor_max": 1.5, "parked_max": 3, "drops_late": True,
    }  # fmt: skip
    settings = RetrievalSettings(**changed)
    found = asdict(settings.scheduler()) | asdict(settings.control())
    assert {name: found[name] for name in changed} == changed
    for wrong in ({"places": 40}, {"slots": 33}, {"gather_min": 0}, {"share_min": 0.95}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            RetrievalSettings(**wrong)


def test_what_is_set_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places, slots and the scheduler's settings (issue 10, 27)."""
    found: list[EngineSettings] = []

    def engine(settings: EngineSettings) -> None:
        found.append(settings)
        raise ConfigError("it was told")

    monkeypatch.setattr(worker, "SearchEngine", engine)
    settings = RetrievalSettings(places=5, slots=64, gather_min=3, share=0.25)
    with pytest.raises(ConfigError, match="it was told"):
        worker.RetrievalWorker(LogSettings(), settings, ShardPlace(0, 1), "r", Codec())
    (told,) = found
    assert (told.places, told.slots) == (5, 64)
    assert (told.scheduler.gather_min, told.scheduler.share) == (3, 0.25)


def test_the_global_flush_ends_gathering() -> None:
    """With `gather_min`, a search waits for others to be admitted with, and at most
    `global_flush_ms` (issue 10, 27)."""
    settings = RetrievalSettings(gather_min=3, global_flush_ms=15)
    queues = Scheduler(settings.scheduler())
    queues.arrive(Item(kind=Kind.DECODE, extends=10, arrived_ms=0, deadline_ms=NEVER_MS), 0)
    waits = queues.plan(0, 8, 8)
    assert (waits.admit, waits.wake_ms) == ([], 15)
    assert len(queues.plan(15, 8, 8).admit) == 1
