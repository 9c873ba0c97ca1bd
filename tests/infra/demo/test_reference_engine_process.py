"""The engine for comparison as a process: asked twice, and what it says when it cannot answer."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.demo import reference_engine
from infra.demo.reference_engine import ReferenceEngine
from infra.stack.configuration import Settings
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from infra.story.story import Story
from schemas.errors import EngineFailed
from schemas.records import Sampling
from schemas.settings import ModelSettings
from tests.streams.builders import request
from tests.waits import until
from workers.config import WorkerSettings
from workers.models.folder import resolve_model

FAST = {"sim": {"profile": "instant"}}


def stories(*names: str) -> list[Story]:
    sampling = Sampling(max_tokens=5, min_tokens=5, ignore_eos=True)
    return [Story(request(name, tokens=20, sampling=sampling)) for name in names]


def reference(tmp_path: Path, path: str = "") -> ReferenceEngine:
    model = ModelSettings(path=path) if path else resolve_model(ModelSettings(), "sim")
    settings = Settings(worker=WorkerSettings(engine="sim"), model=model)
    return ReferenceEngine(Stack(settings, StackPlan(), folder=tmp_path))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[ReferenceEngine]:
    new_engine = reference(tmp_path)
    yield new_engine
    new_engine.stop()


def test_reference_engine_compares_answers_asked_early_or_late(engine: ReferenceEngine) -> None:
    first, second = stories("r1", "r2")
    engine.ask([first])
    comparisons = engine.compare([first, second])
    assert [
        (comparison.request_id, comparison.tokens, comparison.equal) for comparison in comparisons
    ] == [
        ("r1", 5, False),
        ("r2", 5, False),
    ]
    assert [comparison.first_difference for comparison in comparisons] == [0, 0], (
        "nothing was served"
    )


def test_reference_engine_error_reports_early_exit(tmp_path: Path) -> None:
    engine = reference(tmp_path, path=str(tmp_path / "nowhere"))
    with pytest.raises(EngineFailed, match="ended early"):
        engine.compare(stories("r1"))


def test_reference_engine_stop_tolerates_dead_process(engine: ReferenceEngine) -> None:
    os.killpg(engine._process.pid, signal.SIGKILL)
    engine._process.wait()
    engine.stop()


def test_reference_engine_times_out_hanging_process(
    engine: ReferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.killpg(engine._process.pid, signal.SIGSTOP)
    monkeypatch.setattr(reference_engine, "_LIMIT_S", 0.1)
    engine.ask(stories(*map(str, range(2_000))))  # more than its pipe holds
    with pytest.raises(EngineFailed, match=r"took over 0\.1 s"):
        engine.compare(stories("r1"))


async def test_reference_engine_stop_ends_pending_compare(engine: ReferenceEngine) -> None:
    os.killpg(engine._process.pid, signal.SIGSTOP)
    waiting = asyncio.create_task(asyncio.to_thread(engine.compare, stories("r1")))
    await until(lambda: engine._requests.closed)
    engine.stop()
    with pytest.raises(EngineFailed, match="ended early"):
        await waiting
