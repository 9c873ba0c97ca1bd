"""A snapshot that a fork writes is that of the moment of the fork, and costs the router nothing."""

import asyncio
import gc
import os

import pytest

from schemas.errors import TriviumError
from streams.config import RouterSettings
from streams.core.events import PartitionReady, PartitionTaken
from streams.core.router import Router
from streams.journal import snapshot
from streams.journal.snapshot import snapshot_in_fork, unpack_router
from tests.streams.builders import T0
from tests.waits import run

# From Python 3.12 on it warns of forks beside threads; this one only writes and ends.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def test_fork_writes_state_of_its_moment() -> None:
    """The state is larger than a pipe holds."""

    async def main() -> None:
        router = Router("router-a", RouterSettings())
        for number in range(20_000):
            router.tables.ended_ids.add(os.urandom(16).hex(), T0 + number, 0)
        snapshot = asyncio.create_task(snapshot_in_fork(router))
        await asyncio.sleep(0)  # it has begun
        router.apply(PartitionTaken(0), T0)
        router.apply(PartitionReady(0), T0)
        state = await snapshot
        assert len(state) > 1 << 18
        assert unpack_router(state).owned == set()
        assert router.owned == {0}

    run(main())


def test_fork_failure_raises_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Router) -> bytes:
        raise ValueError("a bug")

    monkeypatch.setattr(snapshot, "pack_router", broken)
    with pytest.raises(TriviumError, match="was not written down"):
        run(snapshot_in_fork(Router("router-a", RouterSettings())))


def test_fork_collects_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collected connection would leave the set that both processes poll."""
    monkeypatch.setattr(snapshot, "pack_router", lambda _: str(gc.isenabled()).encode())
    assert run(snapshot_in_fork(Router("router-a", RouterSettings()))) == b"False"
    assert gc.isenabled()
