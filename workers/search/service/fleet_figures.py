"""What the fleet's heartbeats tell the control loop: KV moved, and decode time stalled."""

from schemas.fleet import FleetView
from schemas.records import Heartbeat, MemberKind


class FleetFigures:
    """Folds heartbeats; a rate is known from the second one of a worker's life on."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int, int]] = {}  # epoch, time and bytes received
        self._rates: dict[str, float] = {}  # bytes per second

    def fold(self, beat: Heartbeat) -> None:
        """One heartbeat."""
        epoch, at_ms, moved = self._last.get(beat.member_id, (0, 0, 0))
        now = (beat.epoch, beat.at_ms, beat.load.kv_bytes_received)
        if epoch != beat.epoch:
            self._rates.pop(beat.member_id, None)
        elif beat.at_ms > at_ms:
            rate = (beat.load.kv_bytes_received - moved) * 1000 / (beat.at_ms - at_ms)
            self._rates[beat.member_id] = max(0.0, rate)
        self._last[beat.member_id] = now

    def link_bytes_per_s(self, view: FleetView, now_ms: int) -> float | None:
        """KV that all living workers with KV receive; None where nobody's rate is known."""
        living = {
            member.member_id
            for member in view.living(MemberKind.WORKER, now_ms)
            if member.registration.capability is not None
        }
        for gone in set(self._last) - set(view.members):
            del self._last[gone]
            self._rates.pop(gone, None)
        rates = [rate for member_id, rate in self._rates.items() if member_id in living]
        return sum(rates) if rates else None


def stalled_share(view: FleetView, now_ms: int) -> float | None:
    """The mean share of decode time that waits for retrievals, of the workers that tell it."""
    shares = [
        member.load.stalled_share
        for member in view.living(MemberKind.WORKER, now_ms)
        if member.load.stalled_share is not None
    ]
    return sum(shares) / len(shares) if shares else None
