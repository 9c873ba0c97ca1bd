"""Answers that go on where they stopped, while workers that were given up still write."""

from collections import Counter
from dataclasses import replace
from itertools import count

import pytest

from infra.simulator.checkers.answers import AnswerLogChecker, ClientChecker
from infra.simulator.checkers.continuing import ContinuationChecker
from infra.simulator.checkers.rebuild import Rebuilds
from infra.simulator.checkers.usage import UsageChecker
from infra.simulator.cluster import READY_MS, Cluster, SimFault
from infra.simulator.faults import losses
from infra.simulator.outcomes import OneOutcome
from infra.simulator.shape import ClusterShape
from schemas.records import Outcome, StreamEnd
from streams.config import RouterSettings
from streams.core.handlers import endings, orders
from streams.core.router import Router
from tests.infra.simulator.serving import serve_all
from tests.infra.simulator.storms import PROFILE, SETUP, lose_heartbeats

DURATION_MS = 8_000.0


def run_with_lost_heartbeats(seed: int) -> Counter[str]:
    """Count continuations while the heartbeats of one worker after the other are lost."""
    settings, checker = RouterSettings(policy="static", tick_ms=50), ContinuationChecker()
    shape = ClusterShape.parse(("2P3D", "3B")[seed % 2])
    names = [name for name, _ in shape.roles()]
    cluster = Cluster(
        shape,
        SETUP,
        settings,
        timeout_ms=60_000,
        gateways=2,
        keeps_log=True,
        checkers=[
            *(OneOutcome(), AnswerLogChecker(), ClientChecker(), UsageChecker(), checker),
            Rebuilds(lambda name: Router(name, settings)),
        ],
        faults=[
            *(
                SimFault(READY_MS + at_ms, lose_heartbeats, name, 3_000.0 + 150.0 * seed)
                for at_ms, name in zip(count(300.0, 1_100.0), names, strict=False)
            ),
            SimFault(READY_MS + 2_500.0, losses.slow_log, 40.0, 1_000.0),
            *[SimFault(READY_MS + 3_400.0, losses.lose_router, 2, 500.0)] * (seed % 3 == 0),
        ],
    )
    serve_all(cluster, PROFILE, per_s=5.0, duration_ms=DURATION_MS, seed=seed)
    return checker.counts


@pytest.mark.parametrize("seed", range(6))
def test_readers_stop_where_next_attempt_begins(seed: int) -> None:
    counts = run_with_lost_heartbeats(seed)
    assert counts["gone on"] and counts["tokens behind a mark"]


def test_usage_checker_finds_missing_worker_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Usage of a whole answer once lacked the worker time of its attempt."""
    right = orders.as_read

    def wrong(outcome: Outcome, end: StreamEnd) -> Outcome:
        return replace(right(outcome, end), worker_ms=0.0)

    monkeypatch.setattr(endings, "as_read", wrong)
    with pytest.raises(AssertionError, match="without those of its answer"):
        run_with_lost_heartbeats(1)
