"""Answers that search while they are generated, in storms (issue 12, 3)."""

from collections import Counter

import pytest

from tests.infra.simulator.checkers.contexts import Contexts
from tests.infra.simulator.checkers.probes import Probed
from tests.infra.simulator.storms import weathered
from workers.llm.stream import HeldStream


def probed(seed: int) -> Counter[str]:
    """A storm; what became of its probes."""
    books = Probed()
    weathered(seed, searching=True, probing=True, more=[books, Contexts()])
    return books.seen


def test_every_invariant_holds_while_answers_search() -> None:
    """Also where workers and routers die meanwhile."""
    seen = sum((probed(seed) for seed in range(4)), Counter[str]())
    kinds = ("put in", "nothing new", "late", "failed", "ends with passages", "works that repeat")
    assert all(seen[kind] for kind in (*kinds, "stalls")), seen


def test_a_worker_that_does_not_tell_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeldStream, "take", lambda self, probed: None)
    with pytest.raises(AssertionError, match="not told"):
        for seed in range(4):
            probed(seed)
