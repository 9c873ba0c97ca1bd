"""Replays what a stack did: records it from the log, and expects the same to be decided again."""

from collections.abc import Sequence
from pathlib import Path

from infra.replay.collecting import record
from infra.replay.replaying import ReplayReport, replay
from schemas.settings import LogSettings
from streams.log.clock import wall_ms
from tests.long_leases import LONG_LEASE_MS, long_leases


async def replayed(
    log: LogSettings,
    path: Path,
    since_ms: int,
    *,
    lease_ms: int = LONG_LEASE_MS,
    look_back_ms: int = 600_000,
    leaves_out: Sequence[str] = (),
) -> ReplayReport:
    """Of a stack with such leases."""
    with long_leases(lease_ms):
        await record(
            log, path, since_ms, wall_ms(), look_back_ms=look_back_ms, leaves_out=leaves_out
        )
        report = replay(path)
    differences = [life.difference for life in report.lives if life.difference is not None]
    assert differences == [], "what was decided is not decided again"
    assert report.lives
    return report
