"""When it is written how many workers are wanted."""

from typing import Any

from infra.stack.announcer import Announcer
from schemas.errors import BrokerUnavailable
from schemas.fleet import SCALING_TARGET_MS
from schemas.records import Role, Wanted, WantedPool


class ProducerOnPaper:
    """Keeps what it is given, unless its broker is away."""

    def __init__(self) -> None:
        self.records: list[Wanted] = []
        self.is_away = False

    async def send(self, topic: str, record: Wanted, *, key: str, partition: int) -> None:
        if self.is_away:
            raise BrokerUnavailable("no broker")
        assert (topic, key, partition) == ("fleet", "#wanted", 0)
        self.records.append(record)


def pools(workers: int) -> list[WantedPool]:
    return [WantedPool(role=Role.DECODE, present=1, workers=workers, work=0.5, why="")]


async def test_announcer_writes_changes_at_once_and_repeats_periodically() -> None:
    paper: Any = ProducerOnPaper()
    announcer = Announcer(paper, "up")
    for now_ms, workers in (
        (0, 2),
        (1_000, 2),
        (2_000, 3),
        (3_000, 3),
        (2_000 + SCALING_TARGET_MS, 3),
    ):
        await announcer.announce(pools(workers), now_ms + SCALING_TARGET_MS)
    assert [record.at_ms - SCALING_TARGET_MS for record in paper.records] == [
        0,
        2_000,
        2_000 + SCALING_TARGET_MS,
    ]
    assert paper.records[1].pools[0].workers == 3 and paper.records[1].written_by == "up"


async def test_announcer_resends_after_broker_outage() -> None:
    paper: Any = ProducerOnPaper()
    announcer = Announcer(paper, "up")
    paper.is_away = True
    await announcer.announce(pools(2), SCALING_TARGET_MS)
    paper.is_away = False
    await announcer.announce(pools(2), SCALING_TARGET_MS + 1)
    assert len(paper.records) == 1
    await announcer.announce([], 9 * SCALING_TARGET_MS)
    assert len(paper.records) == 1, "nobody knows what is wanted"
