"""Invariant 8: answers that search while they are generated, in storms."""

from collections import Counter

import pytest

from infra.simulator.checkers.contexts import Contexts
from infra.simulator.checkers.probes import ProbeChecker, Repeats
from tests.infra.simulator.storms import weathered
from workers.llm.stream import ActiveRequest


def probed(seed: int) -> Counter[str]:
    """Run a storm, and count the results of its probes."""
    books, repeats = ProbeChecker(), Repeats()
    weathered(seed, searching=True, probing=True, extra_checkers=[books, repeats, Contexts()])
    return books.counts + repeats.counts


def test_invariants_hold_while_answers_probe() -> None:
    """Workers and routers die meanwhile."""
    counts = sum((probed(seed) for seed in range(4)), Counter[str]())
    kinds = ("put in", "nothing new", "late", "failed", "ends with passages", "works that repeat")
    repeat_kinds = ("stalls", "repeated behind passages")
    assert all(counts[kind] for kind in (*kinds, *repeat_kinds)), counts


def test_probe_checker_finds_worker_that_omits_probe_notice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
def test_checkers_find_router_that_forgets_probes(
    places: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router forgets them at once, or when it takes over a partition."""
    for place in places:
        monkeypatch.setattr(f"streams.core.{place}.with_probe", lambda probes, *_: probes)
    with pytest.raises(AssertionError, match=message):
        for seed in range(4):
            probed(seed)
