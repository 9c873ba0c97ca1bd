"""Which processes the chaos run hits, and when."""

import random
from collections import Counter

from infra.bench.faults import chaos
from infra.bench.faults.kill_schedule import BROKER, FREEZE, KILL, Blow, draw


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
