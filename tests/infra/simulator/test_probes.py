"""Invariant 8: answers that search while they are generated, in storms."""

from collections import Counter

import pytest

from infra.simulator.checkers.contexts import Contexts
from infra.simulator.checkers.probes import ProbeChecker
from infra.simulator.checkers.repeats import Repeats
from tests.infra.simulator.storms import weathered
from workers.llm.stream import ActiveRequest


def probed(seed: int) -> Counter[str]:
    """A storm; what became of its probes."""
    books, repeats = ProbeChecker(), Repeats()
    weathered(seed, searching=True, probing=True, more=[books, repeats, Contexts()])
    return books.counts + repeats.counts


def test_every_invariant_holds_while_answers_search() -> None:
    """Also where workers and routers die meanwhile."""
    seen = sum((probed(seed) for seed in range(4)), Counter[str]())
    kinds = ("put in", "nothing new", "late", "failed", "ends with passages", "works that repeat")
    more = ("stalls", "repeated behind passages")
    assert all(seen[kind] for kind in (*kinds, *more)), seen


def test_a_worker_that_does_not_tell_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ActiveRequest, "take", lambda self, probed: None)
    with pytest.raises(AssertionError, match="not told"):
        for seed in range(4):
            probed(seed)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (["router", "requests.recovery"], "without what was put in before it"),
        (["requests.recovery"], "the log tells"),
    ],
)
def test_a_router_that_forgets_probes_is_found(
    places: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live as well, or only when it takes a partition over."""
    for place in places:
        monkeypatch.setattr(f"streams.core.{place}.with_probe", lambda kept, *_: kept)
    with pytest.raises(AssertionError, match=message):
        for seed in range(4):
            probed(seed)
