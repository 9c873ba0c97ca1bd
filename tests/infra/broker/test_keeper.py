"""Keeping a stack's broker running."""

import asyncio

import pytest

from infra.broker.keeper import BrokerKeeper
from schemas.errors import BrokerUnavailable
from tests.virtual_time import virtual
from tests.waits import until


class StubbornBroker:
    """Dies again and again, and sometimes cannot have its port at once."""

    log_file = "x.log"

    def __init__(self) -> None:
        self.alive = False
        self.spawns: list[bool] = []
        self.refusals = 0

    def is_running(self) -> bool:
        return self.alive

    def restart_after_crash(self) -> bool:
        return False

    def answers(self) -> bool:
        return True

    def spawn(self, *, same_port: bool = False) -> str:
        self.spawns.append(same_port)
        if self.refusals:
            self.refusals -= 1
            raise BrokerUnavailable("port 9092 is taken")
        self.alive = True
        return "127.0.0.1:9092"


@virtual
async def test_keeper_restarts_broker_at_same_address_after_each_crash() -> None:
    """A port that is taken for a while does not end the keeper."""
    broker = StubbornBroker()
    keeper = BrokerKeeper(broker, 10.0)  # type: ignore[arg-type]  # as much of one as is asked
    assert await keeper.start() == "127.0.0.1:9092"
    task = asyncio.create_task(keeper.keep())
    for number in range(3):
        broker.alive, broker.refusals = False, number
        await until(lambda: broker.alive, seconds=600)
    assert broker.spawns == [False] + [True] * sum(1 + number for number in range(3))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@virtual
async def test_keeper_error_names_log_of_unresponsive_broker() -> None:
    broker = StubbornBroker()
    broker.answers = lambda: False  # type: ignore[method-assign]  # as long as anybody asks
    with pytest.raises(BrokerUnavailable, match="9092 did not answer within 10 s; see x.log"):
        await BrokerKeeper(broker, 10.0).start()  # type: ignore[arg-type]  # as above
