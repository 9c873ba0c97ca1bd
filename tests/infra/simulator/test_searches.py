"""Requests that want something found, in storms: one outcome each, one prompt, told in time."""

import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from infra.simulator.checkers.contexts import Contexts
from schemas.records import OutcomeKind
from streams.core import router
from streams.core.handlers import attempts, retrievals
from streams.core.requests import recovery
from tests.infra.simulator.storms import weathered


def searched(seed: int) -> Contexts:
    """Run a storm in which routers also die while requests wait for a search."""
    books = Contexts()
    cluster = weathered(seed, searching=True, extra_checkers=[books])
    kinds = {request.outcome.kind for request in cluster.clients.requests if request.outcome}
    assert OutcomeKind.COMPLETED in kinds
    return books


@pytest.mark.parametrize("seed", range(8))
def test_invariants_hold_while_routers_die_during_searches(seed: int) -> None:
    """Search results come soon, late, never and twice."""
    books = searched(seed)
    assert books.counts["works with passages"] and books.counts["second answers"]


def test_storms_cover_every_search_result() -> None:
    """Together these seeds reach what the test above is about."""
    counts = sum((searched(seed).counts for seed in (8, 9)), Counter[str]())
    kinds = (
        *("second answers", "errors", "histories", "changed documents"),
        *("repeated words", "citations", "beginnings"),
    )
    assert all(counts[kind] for kind in kinds), counts


# What is wrong, in which module, its lines and what stands in their place, a seed, what it finds.
BUGS = {
    "an answer is applied twice": (
        *(router, "live is None or live.state is not State.RETRIEVING:"),
        "live is None or live.request.retrieval is None:",
        *(0, "charged twice"),
    ),
    "a rebuild takes the last answer": (
        *(recovery, "trace.retrieved is None and not trace.is_over:", "not trace.is_over:"),
        *(0, "the log tells"),
    ),
    "a rebuild has the plain prompt": (
        *(recovery, "live.take(with_context(request, trace.retrieved))", "pass"),
        *(0, "before its reader was told"),
    ),
    "what is late goes on before the log says so": (
        *(retrievals, "self._tables.effects.append(SkipRetrieval(retrieved, live.partition))"),
        "self.apply_retrieved(live, retrieved, now_ms)",
        *(0, "work before its search has an outcome"),
    ),
    "readers are not told": (
        *(
            retrievals,
            "        self.tell(live)\n        self._tables.enq",
            "        self._tables.enq",
        ),
        *(0, "before its reader was told"),
    ),
    "the next router does not tell again": (
        *(attempts, "self._retrievals.tell(live)", "pass"),
        *(0, "before its reader was told"),
    ),
}
REPLACED = {
    router: ("infra.simulator.cluster", "tests.infra.simulator.storms"),
    recovery: ("streams.core.router",),
    retrievals: ("streams.core.router",),
    attempts: ("streams.core.router",),
}
NAMES = {router: "Router", recovery: "Rebuild", retrievals: "Retrievals", attempts: "Attempts"}


@pytest.mark.parametrize("bug", BUGS)
def test_storm_finds_bug_in_searches(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, right, wrong, seed, message = BUGS[bug]
    source = Path(str(module.__file__)).read_text()
    assert source.count(right) == 1
    changed = ModuleType("core_with_a_bug")
    monkeypatch.setitem(sys.modules, changed.__name__, changed)  # for its dataclasses
    exec(source.replace(right, wrong), changed.__dict__)
    name = NAMES[module]
    for place in REPLACED[module]:
        monkeypatch.setattr(f"{place}.{name}", changed.__dict__[name])
    with pytest.raises(AssertionError, match=message):
        searched(seed)
