"""Section [retrieval]: what is refused, and what reaches the engine."""

from dataclasses import asdict, fields
from typing import Any

import pytest

from schemas.codec import Codec
from schemas.errors import ConfigError
from schemas.settings import LogSettings
from workers.retrieval import worker
from workers.retrieval.settings import RetrievalSettings, ShardPlace
from workers.vector.cuda.batch import sizes_up_to
from workers.vector.engine.engine import EngineSettings
from workers.vector.engine.queues import NEVER_MS, QueuedSearch
from workers.vector.engine.scheduler import SchedulerSettings, SearchScheduler
from workers.vector.index.kinds import SearchKind
from workers.vector.kernels.metrics import Metric


def test_retrieval_settings_reject_wrong_values() -> None:
    settings = RetrievalSettings(metrics=("a=sqeuclidean",), share=0.25, park_after_ms=7)
    assert Metric(settings.metric_of("a")) is Metric.SQEUCLIDEAN
    assert Metric(settings.metric_of("b")) is Metric.COSINE
    assert settings.scheduler().share == 0.25 and settings.scheduler().park_after_ms == 7
    cases: list[tuple[dict[str, Any], str]] = [
        ({"metrics": ("a=euclid",)}, "collection=metric .* found 'a=euclid'"),
        ({"storages": ("a=int8",)}, "collection=storage .* float32, float16, found 'a=int8'"),
        ({"storages": ("float16",)}, "collection=storage .* found 'float16'"),
        ({"lanes": 1_025}, "lanes: expected at most 1024"),
        ({"word_threads": 0}, "word_threads: expected at least 1"),
        ({"cuda_device": -1}, "cuda_device: expected at least 0"),
        ({"cuda_places": 65, "cuda_slots": 64}, "at least retrieval.cuda_places .65., found 64"),
        ({"cuda_slots": 1 << 17}, "cuda_slots: expected at most 65536"),
        ({"cuda_dim_max": 100}, "cuda_dim_max: expected a multiple of 16"),
        ({"recalls": ("a=95",)}, "collection=recall .* below 1, found 'a=95'"),
        ({"recalls": ("a",)}, "collection=recall .* below 1, found 'a'"),
        ({"shares_snapshots": True}, "expected a retrieval.snapshot_folder beside it"),
        ({"top_m": 0}, "top_m: expected at least 1"),
        ({"top_m": 2_049}, "top_m: expected at most 2048, found 2049"),
        ({"top_m": 513, "device": "auto"}, "top_m: expected at most 512 on .* auto, found 513"),
        ({"degree": 342}, "degree: expected at most 341, found 342"),
        ({"degree": 64, "width": 65}, "width: expected at most 64 with degree 64, found 65"),
        ({"share": 2.0}, "share: expected at most 1"),
        ({"flush_ms": 21.0}, "flush_ms: expected at most global_flush_ms .20., .* found 21"),
    ]
    for wrong, message in cases:
        with pytest.raises(ConfigError, match=message):
            RetrievalSettings(**wrong)


def test_shard_place_parses_number_and_count() -> None:
    assert ShardPlace.parse("1/3") == ShardPlace(1, 3)
    assert str(ShardPlace(1, 3)) == "1/3"
    for text in ("", "1", "3/3", "-1/2", "a/b", "1/0", "0/1025"):
        with pytest.raises(ConfigError, match="expected SHARD/SHARDS"):
            ShardPlace.parse(text)


def test_retrieval_settings_cover_scheduler_settings() -> None:
    """Defaults are equal; only the measured extend time is no setting."""
    names = {field.name for field in fields(RetrievalSettings)}
    of_scheduler = {field.name for field in fields(SchedulerSettings)} - {"ms_per_extend"}
    assert of_scheduler | {"places", "slots", "patience"} <= names
    assert RetrievalSettings().scheduler() == SchedulerSettings()
    changed: dict[str, Any] = {
        "share": 0.3,
        "park_after_ms": 9,
        "parked_max": 3,
        "drops_late": True,
    }
    settings = RetrievalSettings(**changed)
    values = asdict(settings.scheduler()) | asdict(settings)
    assert {name: values[name] for name in changed} == changed
    for wrong in ({"places": 40}, {"slots": 33}, {"gather_min": 0}, {"share_min": 0.95}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            RetrievalSettings(**wrong)


def test_settings_give_target_recall_of_collection() -> None:
    settings = RetrievalSettings(recalls=("books=0.95", "news=0.9"))
    assert [settings.recall_of(name) for name in ("books", "news", "other")] == [0.95, 0.9, 0]


def test_retrieval_settings_reach_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places, slots, lanes, devices and the scheduler's settings arrive there."""
    calls: list[EngineSettings] = []

    def engine(settings: EngineSettings, clock_ms: object) -> None:
        calls.append(settings)
        raise ConfigError("it was told")

    monkeypatch.setattr(worker, "SearchEngine", engine)
    settings = RetrievalSettings(
        places=5, slots=64, gather_min=3, share=0.25, lanes=3, ahead=7, cuda_device=1,
        cuda_places=100, cuda_slots=300, cuda_dim_max=512,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="it was told"):
        worker.RetrievalWorker(LogSettings(), settings, ShardPlace(0, 1), "r", Codec())
    (engine_settings,) = calls
    assert (engine_settings.places, engine_settings.slots) == (5, 64)
    assert (engine_settings.scheduler.gather_min, engine_settings.scheduler.share) == (3, 0.25)
    assert (engine_settings.lanes, engine_settings.ahead, engine_settings.cuda_device) == (3, 7, 1)
    assert (
        engine_settings.cuda.slots,
        engine_settings.cuda.sizes,
        engine_settings.cuda.dim_max,
    ) == (300, (64, 100), 512)


def test_retrieval_defaults_equal_engine_defaults() -> None:
    """Equal defaults let benchmarks measure what workers run."""
    settings, engine = RetrievalSettings(), EngineSettings()
    assert (settings.lanes, settings.places, settings.slots, settings.ahead) == (
        engine.lanes, engine.places, engine.slots, engine.ahead
    )  # fmt: skip
    assert (settings.cuda_slots, settings.cuda_dim_max) == (engine.cuda.slots, engine.cuda.dim_max)
    assert sizes_up_to(settings.cuda_places) == engine.cuda.sizes == (64, 256, 1_024)
    assert sizes_up_to(64) == (64,) and sizes_up_to(3_000) == (64, 256, 3_000)


def test_global_flush_ends_gathering() -> None:
    """With `gather_min`, a search waits for others, but at most `global_flush_ms`."""
    settings = RetrievalSettings(gather_min=3, global_flush_ms=15)
    queues = SearchScheduler(settings.scheduler())
    queues.arrive(
        QueuedSearch(kind=SearchKind.DECODE, extends=10, arrived_ms=0, deadline_ms=NEVER_MS), 0
    )
    waits = queues.plan(0, 8, 8)
    assert (waits.admit, waits.wake_ms) == ([], 15)
    assert len(queues.plan(15, 8, 8).admit) == 1
