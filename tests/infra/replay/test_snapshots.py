"""A router that was read from a snapshot decides on exactly as the one that it was made of."""

import os
import pickle
import subprocess
import sys
import zlib
from collections.abc import Sequence

import numpy as np
import pytest

from infra.simulator.cluster import Checker, Cluster
from schemas.errors import RecordError
from schemas.log.clients import LogProducer
from streams.config import RouterSettings
from streams.core.effects import Effect
from streams.core.events import Event
from streams.core.router import Router
from streams.gateway.request.check_process import CheckProcess
from streams.journal.snapshot import numbers, pack_router, unpack_router
from tests.infra.simulator.storms import weathered

LOOKS = 20  # between two snapshots


class Shadow(Checker):
    """Applies everything to a router from a snapshot too, and compares what follows."""

    def __init__(self) -> None:
        self.snapshots = self.compared = 0
        self._looks = 0
        self._shadow: Router | None = None

    def on_tick(self, cluster: Cluster) -> None:
        """Begin anew from a snapshot, now and then."""
        if not self._looks % LOOKS and cluster.router.alive:
            self._shadow = unpack_router(pack_router(cluster.router.core))
            self.snapshots += 1
        self._looks += 1

    def on_router_death(self) -> None:
        self._shadow = None

    def on_event(self, event: Event, effects: Sequence[Effect], now_ms: float) -> None:
        if self._shadow is not None:
            assert self._shadow.apply(event, int(now_ms)) == list(effects), event
            self.compared += bool(effects)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_read_from_a_snapshot_decides_alike(seed: int) -> None:
    shadow = Shadow()
    weathered(seed, more=[shadow], searching=seed == 1)
    assert shadow.snapshots > 3
    assert shadow.compared > 100


def test_what_is_decided_does_not_depend_on_the_order_of_sets() -> None:
    """Another process, in which strings have other hashes, decides the same."""
    program = (
        "from tests.infra.replay.test_snapshots import Sums\n"
        "from tests.infra.simulator.storms import weathered\n"
        "sums = Sums(); weathered(5, more=[sums]); print(sums.checksum)"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1] != "0\n"


class Sums(Checker):
    """A checksum of everything that was decided."""

    checksum = 0

    def on_event(self, event: Event, effects: Sequence[Effect], now_ms: float) -> None:
        self.checksum = zlib.crc32(repr(effects).encode(), self.checksum)


def test_no_foreign_code_is_run() -> None:
    """A recording may come from anywhere."""

    class Foreign:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, ("false",)

    with pytest.raises(RecordError, match="system is no part of a router"):
        unpack_router(zlib.compress(pickle.dumps(Foreign())))
    with pytest.raises(RecordError, match="is no part of a router"):
        unpack_router(zlib.compress(pickle.dumps(Cluster)))


@pytest.mark.parametrize("kind", [CheckProcess, LogProducer])
def test_nothing_is_made_that_does_more_than_hold_values(kind: type) -> None:
    """Classes of the project's own start processes and connect."""
    with pytest.raises(RecordError, match="is no part of a router"):
        unpack_router(zlib.compress(pickle.dumps(kind)))


class Objects:
    """An array whose bytes are taken for addresses of objects."""

    def __reduce__(self) -> tuple[object, ...]:
        return np.ndarray, ((1,), np.dtype("O"), (0xDEADBEEF).to_bytes(8, "little"))


class OfObjects:
    """The same by the name that is allowed."""

    def __reduce__(self) -> tuple[object, ...]:
        return numbers, ("|O", (1,), b"\xef" * 8)


@pytest.mark.parametrize(
    ("evil", "said"), [(Objects, "ndarray is no part"), (OfObjects, "numbers")]
)
def test_no_bytes_are_taken_for_objects(evil: type, said: str) -> None:
    """A recording crashed the process at an address of its choice (found 28)."""
    with pytest.raises(RecordError, match=said):
        unpack_router(zlib.compress(pickle.dumps(frozenset([evil()]))))


def test_a_small_snapshot_does_not_become_a_large_one() -> None:
    zeros = pickle.dumps(bytes(64 << 20))
    with pytest.raises(RecordError, match="expected a whole state of at most 16777216 bytes"):
        unpack_router(zlib.compress(zeros))


def test_what_is_no_snapshot_is_refused() -> None:
    whole = pack_router(Router("router-a", RouterSettings()))
    assert unpack_router(whole).router_id == "router-a"
    for state in (b"", b"nothing", whole[:-20], zlib.compress(pickle.dumps({"a": 1}))):
        with pytest.raises(RecordError, match="router"):
            unpack_router(state)
