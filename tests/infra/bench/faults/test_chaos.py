"""The chaos run's parts without a stack: what it draws, and what it takes for lost and wrong."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from infra.bench.faults import chaos
from infra.bench.faults.chaos_figures import ChaosRun, bars
from infra.bench.faults.conversation_load import Talks, wrong
from infra.bench.faults.expected_answers import ExpectedAnswer
from infra.bench.faults.http_clients import BROKEN, WHOLE, Seen
from infra.bench.faults.kill_schedule import BROKER, FREEZE, KILL, Blow, draw
from infra.bench.faults.log_audit import Audit
from schemas.records import OutcomeKind
from tests.schemas.examples import example


def drawn(seed: int = 1) -> list[Blow]:
    return draw(
        list(chaos.PLAN.names()),
        seconds=600,
        broker_every_s=30,
        broker_away_s=60,
        rng=random.Random(seed),
    )


def test_ten_minutes_hit_everybody_and_the_broker_every_thirty_seconds() -> None:
    blows = drawn()
    assert drawn() == blows != drawn(2)
    assert {blow.name for blow in blows} == {*chaos.PLAN.names(), BROKER}
    broker = [blow for blow in blows if blow.name == BROKER]
    assert [blow.at_s for blow in broker] == [30.0 * n for n in range(1, 20)]
    assert [blow.lasts_s for blow in broker if blow.lasts_s] == [60.0]
    others = [blow.at_s for blow in blows if blow.name != BROKER]
    pauses = [later - earlier for earlier, later in zip(others, others[1:], strict=False)]
    assert 2 <= min(pauses) < max(pauses) <= 5
    hows = Counter(blow.how for blow in blows)
    assert hows[KILL] > hows[FREEZE] > 20


def seen(text: str, *, ended: str = WHOLE, request_id: str = "r1", client: str = "plain") -> Seen:
    return Seen(client=client, ended=ended, request_id=request_id, text=text)


def test_an_answer_is_wrong_where_it_differs_as_far_as_it_came() -> None:
    expected = {"r1": ExpectedAnswer(text="one two three")}
    fine = [
        seen("one two three"),
        seen("one tw", ended=BROKEN),
        seen("", ended=BROKEN, request_id=""),
    ]
    assert wrong(fine, expected) == []
    bad = [seen("one two"), seen("one too", ended=BROKEN), seen("one", request_id="r2")]
    assert [line.partition(": ")[2] for line in wrong(bad, expected)] == [
        "plain saw '' after 7 characters, expected ' three'",
        "plain saw 'oo' after 5 characters, expected 'wo three'",
        "answered, but not on the log",
    ]


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
