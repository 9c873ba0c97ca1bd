"""Which processes the chaos run hits, and when."""

import random
from collections import Counter

from infra.bench.faults import chaos
from infra.bench.faults.kill_schedule import BROKER, FREEZE, KILL, STOP, InjectedFault, draw


def schedule(seed: int = 1) -> list[InjectedFault]:
    names = list(chaos.PLAN.names())
    return draw(names, seconds=600, every_s=5, broker_kills=3, rng=random.Random(seed))


def test_kill_schedule_hits_all_processes_in_three_ways() -> None:
    blows = schedule()
    assert schedule() == blows != schedule(2)
    assert {blow.name for blow in blows} == {*chaos.PLAN.names(), BROKER}
    broker = [blow for blow in blows if blow.name == BROKER]
    assert [(blow.at_s, blow.how) for blow in broker] == [(152.5, KILL), (302.5, KILL),
                                                          (452.5, KILL)]  # fmt: skip
    process_blows = [blow for blow in blows if blow.name != BROKER]
    assert [blow.at_s for blow in process_blows] == [5.0 * n for n in range(1, 120)]
    hows = Counter(blow.how for blow in process_blows)
    assert min(hows[how] for how in (KILL, FREEZE, STOP)) > 25
