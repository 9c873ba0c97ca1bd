"""Finds the gateways that are lost, on which live requests depend. Decides nothing."""

from collections.abc import Iterable

from streams.core.fleet.workers import Fleet, Gateway


class ReaderWatch:
    """Finds the gateway processes that are lost, so that they can no longer deliver answers.

    A gateway process that reads an answer is its gateway's id and start time, which its
    registrations have in all epochs: one that only lost its lease, or its broker, comes back as
    itself, and its streams continue. It is lost when its lease has ended, or another process has
    its id, for the length of a grace. While this router reads no fleet records, no grace runs, and
    after a takeover each grace starts again: a loss is found late at worst.
    """

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
