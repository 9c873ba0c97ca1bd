"""What somebody who only watches the fleet knows."""

import pytest

from infra.stack.fleet_watch import FleetWatch
from infra.stack.reassignment import _same_life
from schemas.errors import NotReady
from schemas.fleet import LEASE_MS
from schemas.records import (
    AssignRoles,
    Role,
)
from schemas.settings import LogSettings
from tests.infra.watched_fleet import CODEC
from tests.streams.builders import T0, beat, registration


def test_worker_is_silent_only_while_others_send_heartbeats() -> None:
    watch, order = (
        FleetWatch(LogSettings()),
        AssignRoles(worker_id="both-0", worker_epoch=1, roles=(Role.DECODE,), at_ms=T0),
    )
    records = [registration("both-0", Role.DECODE), beat("both-0", 1), beat("other-0", 1)]
    for offset, (record, now_ms) in enumerate(
        zip(records, (T0, T0 + 500, T0 + 500 + LEASE_MS), strict=True)
    ):
        watch._fold(CODEC.encode(record), offset, now_ms)
        assert _same_life(watch, order).epoch == 1  # T0 is long ago, and nobody was heard since
    watch._fold(CODEC.encode(beat("other-0", 2)), 3, T0 + 501 + LEASE_MS)
    with pytest.raises(NotReady, match="both-0 fell silent before it had followed the order"):
        _same_life(watch, order)
