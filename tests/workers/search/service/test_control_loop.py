"""The control loop in the process: what it looks at, what it moves, what it tells."""

import asyncio
from collections.abc import Sequence
from typing import Any

from schemas.fleet import FleetView
from schemas.records import (
    Capability,
    ControlMoved,
    Heartbeat,
    Load,
    MemberKind,
    MemberState,
    Registration,
    Role,
)
from tests.waiting import run, until
from workers.search.engine.control import ControlSettings
from workers.search.index.kinds import Kind
from workers.search.service.control_loop import ControlLoop
from workers.search.service.fleet_figures import FleetFigures

ABLE = Capability(
    model="m", engine="sim", engine_id="e", block_size=16, max_model_len=9, running_max=4
)


class FakeEngine:
    def __init__(self, wait_ms: float | None) -> None:
        self.wait_ms = wait_ms
        self.moves: list[tuple[float, float]] = []

    def set_share(self, share: float, flush_ms: float) -> None:
        self.moves.append((share, flush_ms))

    def waits_ms(
        self, kind: Kind, shares: Sequence[float], now_ms: float, window_ms: float = 0
    ) -> list[float] | None:
        assert (kind, tuple(shares)) == (Kind.PREFILL, (0.95,))
        return None if self.wait_ms is None else [self.wait_ms]


class FakeMembership:
    member_id = "r"

    def __init__(self) -> None:
        self.view = FleetView()
        self.figures = FleetFigures()

    def beat(self, seq: int, at_ms: int, load: Load) -> None:
        if seq == 1:
            registration = Registration(
                member_id="d",
                epoch=1,
                kind=MemberKind.WORKER,
                roles=(Role.DECODE,),
                started_ms=0,
                capability=ABLE,
            )
            self.view.apply(registration, 0, at_ms)
        beat = Heartbeat(
            member_id="d", epoch=1, seq=seq, at_ms=at_ms, state=MemberState.READY, load=load
        )
        self.view.apply(beat, seq, at_ms)
        self.figures.fold(beat)


class FakeProducer:
    def __init__(self) -> None:
        self.sent: list[ControlMoved] = []

    async def send(self, topic: str, record: Any, *, key: str, partition: int) -> Any:
        assert (topic, key, partition) == ("retrieval.control", "r", 0)
        self.sent.append(record)
        ack = asyncio.get_running_loop().create_future()
        ack.set_result(None)
        return ack


def control_loop(engine: FakeEngine, fleet: FakeMembership, producer: Any = None) -> ControlLoop:
    settings = ControlSettings(
        control_interval_ms=1, link_target_bytes_per_s=1_000, wait_target_ms=2
    )
    return ControlLoop(settings, engine, 0.5, 5.0, fleet.figures, fleet, producer)  # type: ignore[arg-type]  # fakes


def test_slow_links_and_long_waits_give_prefill_more_and_stalls_give_it_less() -> None:
    fleet = FakeMembership()
    fleet.beat(1, 0, Load())
    fleet.beat(2, 1_000, Load(kv_bytes_received=500))
    engine = FakeEngine(wait_ms=4)
    loop = control_loop(engine, fleet)
    move = loop.look(1_000)
    assert move.signals.link_bytes_per_s == 500 and move.signals.prefill_wait_ms_p95 == 4
    assert move.error == 1.5, "half the bandwidth, twice the wait"
    assert engine.moves == [(move.share, move.flush_ms)]
    assert move.share > 0.5 and move.flush_ms < 5
    engine.wait_ms = None
    fleet.beat(3, 2_000, Load(kv_bytes_received=2_500, stalled_share=0.5))
    back = loop.look(2_000)
    assert back.signals.decode_stalled_share == 0.5
    assert back.share_before == move.share and back.share < move.share
    assert back.flush_ms > move.flush_ms


def test_nothing_known_moves_nothing_and_moves_are_published_with_their_inputs() -> None:
    async def main() -> None:
        producer, engine = FakeProducer(), FakeEngine(wait_ms=None)
        loop = control_loop(engine, FakeMembership(), producer)
        assert loop.look(0).is_still and engine.moves == []
        engine.wait_ms = 6
        running = asyncio.create_task(loop.run())
        await until(lambda: len(producer.sent) >= 2)
        running.cancel()
        first, second = producer.sent[:2]
        assert (first.prefill_wait_ms_p95, first.link_bytes_per_s) == (6, None)
        assert (first.share_before, first.error) == (0.5, 2.0)
        assert second.share_before == first.share > 0.5
        assert (first.share, first.flush_ms) == engine.moves[0]

    run(main())
