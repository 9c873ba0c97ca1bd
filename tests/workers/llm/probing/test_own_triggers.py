"""Triggers that others have written: found by their entry points, and held at arm's length."""

import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from schemas.records import Probing
from tests.workers.llm.probing import own_triggers
from workers.llm.probing import triggers
from workers.llm.probing.triggers import (
    GROUP,
    Every,
    TriggerInput,
    Uncertain,
    installed_triggers,
    trigger_of,
)

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def looked_up_anew() -> Iterator[None]:
    installed_triggers.cache_clear()
    yield
    installed_triggers.cache_clear()


def seen(tokens: int, text: str) -> TriggerInput:
    return TriggerInput(tokens=tokens, asked_tokens=0, text=text, logprobs=())


def test_the_built_in_ones_use_the_same_door() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (
        [*installed_triggers()]
        == [*project["entry-points"][GROUP]]
        == ["every", "sentence", "uncertain"]
    )
    assert trigger_of(Probing(trigger="uncertain")).wants_logprobs
    assert installed_triggers()["uncertain"] is Uncertain


def test_what_the_page_shows_is_found_when_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a package, by its name."""
    monkeypatch.syspath_prepend(own_triggers.install(tmp_path))
    assert [*installed_triggers()] == ["every", "sentence", "uncertain", own_triggers.NAME]
    trigger = trigger_of(Probing(trigger=own_triggers.NAME, every=4))
    said = [(3, "it might"), (4, "it"), (4, "so it might"), (9, "it is so")]
    assert [trigger.asks(seen(*each)) for each in said] == [False, False, True, False]
    assert trigger.is_place(seen(5, "so it might be"))


def entry(monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    """These are all that is installed."""
    found = [EntryPoint(name, value, GROUP) for name, value in points.items()]
    monkeypatch.setattr(triggers, "entry_points", lambda *, group: found)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("no_such_module:Trigger", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("math:pi", "expected a class with wants_logprobs, asks and is_place"),
        ("math:no_such_name", "AttributeError"),
    ],
)
def test_what_cannot_be_loaded_is_left_out(
    value: str, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing else with it."""
    entry(monkeypatch, broken=value, fine="workers.llm.probing.triggers:Every")
    assert [*installed_triggers()] == ["fine"]
    assert "trigger broken is left out: " in caplog.text and why in caplog.text


def test_a_name_is_taken_once_and_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As many as a registration may name."""
    kind = "workers.llm.probing.triggers:Every"
    entry(monkeypatch, **{f"t{n:02}": kind for n in range(65)}, **{"x" * 65: kind})
    assert [*installed_triggers()] == [f"t{n:02}" for n in range(64)]
    assert "trigger t64 of" in caplog.text and f"trigger {'x' * 64} of" in caplog.text


class Careless:
    """Raises where it is told to."""

    wants_logprobs = True
    where = ""

    def __init__(self, probing: Probing) -> None:
        self._fail("made")

    def _fail(self, at: str) -> None:
        if self.where == at:
            raise ZeroDivisionError(at)

    def asks(self, progress: TriggerInput) -> bool:
        self._fail("asks")
        return True

    def is_place(self, progress: TriggerInput) -> bool:
        self._fail("is_place")
        return False


@pytest.mark.parametrize(
    ("where", "asks", "is_place"),
    [("", True, False), ("made", False, True), ("asks", False, True), ("is_place", True, True)],
)
def test_a_mistake_ends_the_probes_of_its_answer(
    where: str,
    asks: bool,
    is_place: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Never the worker's loop; a search under way comes to its end."""
    kinds: dict[str, Callable[[Probing], Any]] = {"careless": Careless, "every": Every}
    monkeypatch.setattr(triggers, "installed_triggers", lambda: kinds)
    monkeypatch.setattr(Careless, "where", where)
    trigger = trigger_of(Probing(trigger="careless"))
    assert trigger.wants_logprobs is (where != "made")
    assert (trigger.asks(seen(1, "a")), trigger.is_place(seen(2, "b"))) == (asks, is_place)
    if where:
        assert f"trigger careless: ZeroDivisionError: {where}" in caplog.text
        assert not trigger.asks(seen(99, "c")), "it is asked nothing more"


def test_one_that_is_missing_is_every_so_many_tokens(caplog: pytest.LogCaptureFixture) -> None:
    """As on a worker that came after the gateway had looked."""
    trigger = trigger_of(Probing(trigger="mood", every=8, lookahead=0))
    assert [trigger.asks(seen(tokens, "")) for tokens in (7, 8)] == [False, True]
    assert "trigger mood is not installed here; every is used" in caplog.text
