"""What the chaos run takes for lost."""

from collections import Counter
from dataclasses import replace

import pytest

from infra.bench.faults.chaos_figures import ChaosRun, bars
from infra.bench.faults.conversation_load import Talks
from infra.bench.faults.http_clients import BROKEN
from infra.bench.faults.log_audit import Audit
from schemas.records import OutcomeKind
from tests.infra.bench.faults.seen_answers import seen
from tests.schemas.examples import example


@pytest.mark.parametrize(
    ("kinds", "lost"),
    [
        ([OutcomeKind.COMPLETED], 0),
        ([OutcomeKind.CANCELLED], 0),
        ([OutcomeKind.EXPIRED], 1),
        ([], 1),
    ],
)
def test_an_accepted_request_is_lost_unless_it_completed(
    kinds: list[OutcomeKind], lost: int
) -> None:
    request, outcome = example("trivium.Request"), example("trivium.Outcome")
    outcomes = [replace(outcome, request_id=request.request_id, kind=kind) for kind in kinds]
    talks = Talks([], seed=1)
    talks.seen = [seen("", ended=BROKEN, client="resuming")]
    run = ChaosRun(
        talks=talks,
        dealt=Counter(),
        missed=0,
        states={"router-0": "ready", "decode-0": "failed"},
        back_s=1.0,
        restarts={},
        audit=Audit({request.request_id: request}, {request.request_id: outcomes}, {}, {}, []),
    )
    found = {bar.name: bar.value for bar in bars(run)}
    assert found["accepted requests lost"] == lost
    assert found["resuming clients not answered"] == 1
    assert found["processes not back"] == 1
    assert found["violations of the log's rules"] == int(not kinds)
