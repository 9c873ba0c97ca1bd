"""Which gateways can no longer deliver what they accepted, and since when this router knows.

Theory of operation. An answer is read at the process that accepted the call, or at others where
its client resumed it. A process is known by its gateway's id and its start, which its registrations
carry in all epochs: so one that only lost its lease, or its broker, comes back as itself, and its
streams go on. A process is lost when its lease has ended, or another has its name, and stayed so
for a grace in which it may come back and its clients may go elsewhere. While this router hears
nobody it counts nothing, and one that takes over begins to count anew: it is at most late.

Decides nothing about requests; `streams/core/router.py` asks once a second.
"""

from collections.abc import Iterable

from streams.core.fleet.members import Fleet
from streams.core.fleet.workers import Gateway


class ReaderWatch:
    """The processes that live requests depend on."""

    def __init__(self, fleet: Fleet, grace_ms: int) -> None:
        self._fleet = fleet
        self._grace_ms = grace_ms
        self._gone_ms: dict[Gateway, int] = {}  # since when each is known to be gone

    def lost_gateways(self, used: Iterable[Gateway], now_ms: int) -> set[Gateway]:
        """Return the used gateways whose grace is over; forget those not asked for."""
        gateways = [gateway for gateway in used if not self._fleet.has_gateway(gateway, now_ms)]
        self._gone_ms = {gateway: self._gone_ms.get(gateway, now_ms) for gateway in gateways}
        return {
            gateway
            for gateway, since_ms in self._gone_ms.items()
            if now_ms - since_ms >= self._grace_ms
        }
