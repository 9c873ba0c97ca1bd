"""Finds the gateway processes that are lost, so that they can no longer deliver answers.

Theory of operation. The gateway process that accepted a call reads its answer, and so do others at
which the client resumed it. A process is identified by its gateway's id and its start time, which
its registrations have in all epochs: so a process that only lost its lease, or its broker, comes
back as itself, and its streams continue. A process is lost when its lease has ended, or another
process has its id, for the length of a grace. In that time it may come back, and its clients may
connect elsewhere. While this router reads no fleet records, no grace runs, and after a takeover
each grace starts again: a loss is found late at worst.

Decides nothing about requests; `streams/core/router.py` calls it once a second.
"""

from collections.abc import Iterable

from streams.core.fleet.members import Fleet
from streams.core.fleet.workers import Gateway


class ReaderWatch:
    """Watches the gateway processes on which live requests depend."""

    def __init__(self, fleet: Fleet, grace_ms: int) -> None:
        self._fleet = fleet
        self._grace_ms = grace_ms
        self._gone_ms: dict[Gateway, int] = {}  # when it was first found absent

    def lost_gateways(self, used: Iterable[Gateway], now_ms: int) -> set[Gateway]:
        """Return the used gateways whose grace is over; forget all gateways that are not used."""
        gateways = [gateway for gateway in used if not self._fleet.has_gateway(gateway, now_ms)]
        self._gone_ms = {gateway: self._gone_ms.get(gateway, now_ms) for gateway in gateways}
        return {
            gateway
            for gateway, since_ms in self._gone_ms.items()
            if now_ms - since_ms >= self._grace_ms
        }
