"""All invariants, in storms drawn from a seed; and bugs that these find."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from schemas.records import OutcomeKind
from tests.infra.simulator.storms import weathered
from workers.llm import active_requests


@pytest.mark.parametrize("seed", range(12))
def test_invariants_hold_in_storm(seed: int) -> None:
    """Workers, routers and gateways die, drain and are cut off, clients leave, the log is slow, and
    records come twice."""
    cluster = weathered(seed)
    kinds = {request.outcome.kind for request in cluster.clients.requests if request.outcome}
    assert OutcomeKind.COMPLETED in kinds


@pytest.mark.parametrize("policy", ["pairs", "round_robin"])
@pytest.mark.parametrize("seed", range(4))
def test_invariants_hold_for_rotation_policies(policy: str, seed: int) -> None:
    """Pools have one worker or unlike sizes, and orchestrations vary."""
    cluster = weathered(seed, policy=policy)
    placed = {request.outcome.kind for request in cluster.clients.requests if request.outcome}
    assert OutcomeKind.COMPLETED in placed


def test_storm_is_same_for_same_seed() -> None:
    first, second = (
        [
            (request.request_id, request.first_ms, request.ended_ms, request.outcome)
            for request in served
        ]
        for served in (weathered(3).clients.requests for _ in range(2))
    )
    assert first == second


# What is wrong, the lines of active_requests.py and what stands in their place, a seed, and what it
# finds.
BUGS = {
    "work that comes twice is begun twice": (
        "if not self.is_addressed_here(work) or not self._is_new(work):",
        "if not self.is_addressed_here(work):",
        *(1, "used twice"),
    ),
    "a hand-over does not wait for its token": (
        "stream.columns.report(record, stream.headers)",
        "self._report(record, stream.headers)",
        *(18, "handed over before its token is in the log"),
    ),
    "a void order is answered": (
        "if stream.ends_request and not order.void:",
        "if stream.ends_request:",
        *(2, "cancelled, and nobody asked for it"),
    ),
    "what is cancelled goes on in the engine": (
        "OutcomeKind.CANCELLED, now_ms))\n        self._probing.abort(job_id)",
        "OutcomeKind.CANCELLED, now_ms))",
        *(2, "which is over"),
    ),
    "what has expired goes on in the engine": (
        "self._probing.abort(job_id)\n            self._expire(self._streams[job_id], now_ms)",
        "self._expire(self._streams[job_id], now_ms)",
        *(4, "which is over"),
    ),
    "tokens are counted wrongly": (
        "stream.seq = seq + len(token_ids)",
        "stream.seq = seq + 1",
        *(0, "text of another place"),
    ),
    "both sides of a pair end an expired request": (
        "self._drop(stream)\n        if stream.ends_request:",
        "self._drop(stream)\n        if True:",
        *(59, "two outcomes"),
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_storm_finds_bug_in_active_requests(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator serves by the rules of workers/llm/active_requests.py."""
    right, wrong, seed, message = BUGS[bug]
    source = Path(active_requests.__file__).read_text()
    assert source.count(right) == 1
    module = ModuleType("held_with_a_bug")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # for its dataclasses
    exec(source.replace(right, wrong), module.__dict__)
    monkeypatch.setattr(
        "infra.simulator.members.worker_process.ActiveRequests", module.ActiveRequests
    )
    with pytest.raises(AssertionError, match=message):
        weathered(seed)


@pytest.mark.parametrize("seed", sorted({seed for *_, seed, _ in BUGS.values()}))
def test_storm_of_bug_seed_passes_without_bug(seed: int) -> None:
    weathered(seed)
