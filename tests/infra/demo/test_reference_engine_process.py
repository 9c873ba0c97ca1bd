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
from tests.waiting import until
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
    made = reference(tmp_path)
    yield made
    made.stop()


def test_answers_are_compared_whenever_they_were_asked_for(engine: ReferenceEngine) -> None:
    first, second = stories("r1", "r2")
    engine.ask([first])
    found = engine.compare([first, second])
    assert [(each.request_id, each.tokens, each.equal) for each in found] == [
        ("r1", 5, False),
        ("r2", 5, False),
    ]
    assert [each.first_difference for each in found] == [0, 0], "nothing was served"


def test_one_that_ends_early_is_told_with_its_last_words(tmp_path: Path) -> None:
    engine = reference(tmp_path, path=str(tmp_path / "nowhere"))
    with pytest.raises(EngineFailed, match="ended early"):
        engine.compare(stories("r1"))


def test_to_stop_one_that_has_ended_raises_nothing(engine: ReferenceEngine) -> None:
    os.killpg(engine._process.pid, signal.SIGKILL)
    engine._process.wait()
    engine.stop()


def test_one_that_hangs_is_ended(engine: ReferenceEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    os.killpg(engine._process.pid, signal.SIGSTOP)
    monkeypatch.setattr(reference_engine, "_LIMIT_S", 0.1)
    engine.ask(stories(*map(str, range(2_000))))  # more than its pipe holds
    with pytest.raises(EngineFailed, match=r"took over 0\.1 s"):
        engine.compare(stories("r1"))


async def test_to_stop_one_that_hangs_ends_who_waits_for_it(engine: ReferenceEngine) -> None:
    os.killpg(engine._process.pid, signal.SIGSTOP)
    waiting = asyncio.create_task(asyncio.to_thread(engine.compare, stories("r1")))
    await until(lambda: engine._requests.closed)
    engine.stop()
    with pytest.raises(EngineFailed, match="ended early"):
        await waiting
