"""Gateways of a simulated cluster: processes that accept requests, beat, die and start again.

What is read at a lost one is read at another where its client resumes, and by nobody else.
"""

from dataclasses import dataclass, field, replace

from infra.simulator.clock import Clock
from schemas.records import (
    Heartbeat,
    Load,
    MemberKind,
    MemberState,
    Registration,
    Request,
    Resumption,
)

KEEPS_RUNNING_EVERY = 5  # so many requests, one asks to go on without its client


@dataclass(slots=True, eq=False)
class SimGateway:
    """One process of a gateway."""

    gateway_id: str
    started_ms: int
    epoch: int = 1
    alive: bool = True
    reading: dict[str, Request] = field(default_factory=dict)

    def registration(self) -> Registration:
        """It joins the fleet."""
        return Registration(
            member_id=self.gateway_id,
            epoch=self.epoch,
            kind=MemberKind.GATEWAY,
            started_ms=self.started_ms,
        )

    def heartbeat(self, seq: int, now_ms: float) -> Heartbeat:
        """It lives."""
        return Heartbeat(
            member_id=self.gateway_id,
            epoch=self.epoch,
            seq=seq,
            at_ms=int(now_ms),
            state=MemberState.READY,
            load=Load(),
        )


class Gateways:
    """All of them; without any, requests come from nowhere."""

    def __init__(self, clock: Clock, count: int) -> None:
        self._clock = clock
        self._accepted = 0
        self.by_id = {
            f"gateway-{number}": SimGateway(f"gateway-{number}", number + 1)
            for number in range(count)
        }

    @property
    def living(self) -> list[SimGateway]:
        """Those that take calls."""
        return [gateway for gateway in self.by_id.values() if gateway.alive]

    def accept(self, request: Request) -> Request:
        """The next of them in turn takes the call."""
        if not self.by_id:
            return request
        self._accepted += 1
        gateway = self.living[self._accepted % len(self.living)]
        found = replace(
            request,
            gateway_id=gateway.gateway_id,
            gateway_started_ms=gateway.started_ms,
            keeps_running=not self._accepted % KEEPS_RUNNING_EVERY,
        )
        gateway.reading[request.request_id] = found
        return found

    def resume(self, request: Request) -> Resumption:
        """A client goes on at one that lives."""
        gateway = self.living[0]
        gateway.reading[request.request_id] = request
        return Resumption(
            request_id=request.request_id,
            session_id=request.session_id,
            gateway_id=gateway.gateway_id,
            gateway_started_ms=gateway.started_ms,
            at_ms=int(self._clock.now_ms),
        )

    def ended(self, request_id: str) -> None:
        """Nobody reads on."""
        for gateway in self.by_id.values():
            gateway.reading.pop(request_id, None)

    def join_again(self, gateway_id: str) -> SimGateway:
        """It was only cut off: the same process, in another epoch."""
        gateway = self.by_id[gateway_id]
        gateway.epoch, gateway.alive = gateway.epoch + 1, True
        return gateway

    def restart(self, gateway_id: str) -> SimGateway:
        """Another process takes the name."""
        epoch = self.by_id[gateway_id].epoch + 1
        found = SimGateway(gateway_id, int(self._clock.now_ms), epoch)
        self.by_id[gateway_id] = found
        return found
