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
def clear_trigger_cache() -> Iterator[None]:
    installed_triggers.cache_clear()
    yield
    installed_triggers.cache_clear()


def trigger_input(tokens: int, text: str) -> TriggerInput:
    return TriggerInput(tokens=tokens, asked_tokens=0, text=text, logprobs=())


def test_builtin_triggers_use_entry_points() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (
        [*installed_triggers()]
        == [*project["entry-points"][GROUP]]
        == ["every", "sentence", "uncertain"]
    )
    assert trigger_of(Probing(trigger="uncertain")).wants_logprobs
    assert installed_triggers()["uncertain"] is Uncertain


def test_installed_package_of_docs_page_provides_trigger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(own_triggers.install(tmp_path))
    assert [*installed_triggers()] == ["every", "sentence", "uncertain", own_triggers.NAME]
    trigger = trigger_of(Probing(trigger=own_triggers.NAME, every=4))
    inputs = [(3, "it might"), (4, "it"), (4, "so it might"), (9, "it is so")]
    assert [trigger.asks(trigger_input(*fields)) for fields in inputs] == [
        False,
        False,
        True,
        False,
    ]
    assert trigger.is_place(trigger_input(5, "so it might be"))


def entry(monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    """These are all that is installed."""
    entry_points = [EntryPoint(name, value, GROUP) for name, value in points.items()]
    monkeypatch.setattr(triggers, "entry_points", lambda *, group: entry_points)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("no_such_module:Trigger", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("math:pi", "expected a class with wants_logprobs, asks and is_place"),
        ("math:no_such_name", "AttributeError"),
    ],
)
def test_trigger_lookup_skips_broken_entry_point(
    value: str, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other entry points still load."""
    entry(monkeypatch, broken=value, fine="workers.llm.probing.triggers:Every")
    assert [*installed_triggers()] == ["fine"]
    assert "trigger broken is left out: " in caplog.text and why in caplog.text


def test_trigger_lookup_limits_name_length_and_count(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The limits are those of a worker's registration."""
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
def test_trigger_error_ends_probes_of_its_answer(
    where: str,
    asks: bool,
    is_place: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The worker's loop survives, and a search under way still completes."""
    kinds: dict[str, Callable[[Probing], Any]] = {"careless": Careless, "every": Every}
    monkeypatch.setattr(triggers, "installed_triggers", lambda: kinds)
    monkeypatch.setattr(Careless, "where", where)
    trigger = trigger_of(Probing(trigger="careless"))
    assert trigger.wants_logprobs is (where != "made")
    assert (trigger.asks(trigger_input(1, "a")), trigger.is_place(trigger_input(2, "b"))) == (
        asks,
        is_place,
    )
    if where:
        assert f"trigger careless: ZeroDivisionError: {where}" in caplog.text
        assert not trigger.asks(trigger_input(99, "c")), "it is asked nothing more"


def test_missing_trigger_falls_back_to_every(caplog: pytest.LogCaptureFixture) -> None:
    """A worker may start after the gateway has checked the trigger's name."""
    trigger = trigger_of(Probing(trigger="mood", every=8, lookahead=0))
    assert [trigger.asks(trigger_input(tokens, "")) for tokens in (7, 8)] == [False, True]
    assert "trigger mood is not installed here; every is used" in caplog.text
