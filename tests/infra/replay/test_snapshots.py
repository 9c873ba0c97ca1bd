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
from streams.calls.request.check_process import CheckProcess
from streams.config import RouterSettings
from streams.core.effects import Effect
from streams.core.events import Event
from streams.core.router import Router
from streams.journal.snapshot import numbers, pack_router, unpack_router
from streams.log.clients import LogProducer
from tests.infra.simulator.storms import weathered

LOOKS = 20  # between two snapshots


class Shadow(Checker):
    """Apply each event to a router from a snapshot too, and compare the effects."""

    def __init__(self) -> None:
        self.snapshots = self.compared = 0
        self._looks = 0
        self._shadow: Router | None = None

    def on_tick(self, cluster: Cluster) -> None:
        """Take a new snapshot at intervals."""
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
def test_router_from_snapshot_decides_same(seed: int) -> None:
    shadow = Shadow()
    weathered(seed, extra_checkers=[shadow], searching=seed == 1)
    assert shadow.snapshots > 3
    assert shadow.compared > 100


def test_router_decisions_do_not_depend_on_hash_seed() -> None:
    """A second process, in which strings have other hashes, decides the same."""
    program = (
        "from tests.infra.replay.test_snapshots import Sums\n"
        "from tests.infra.simulator.storms import weathered\n"
        "sums = Sums(); weathered(5, extra_checkers=[sums]); print(sums.checksum)"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1] != "0\n"


class Sums(Checker):
    """Sum up the effects of all events in one checksum."""

    checksum = 0

    def on_event(self, event: Event, effects: Sequence[Effect], now_ms: float) -> None:
        self.checksum = zlib.crc32(repr(effects).encode(), self.checksum)


def test_snapshot_refuses_foreign_code() -> None:
    """A recording may come from anywhere."""

    class Foreign:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, ("false",)

    with pytest.raises(RecordError, match="system is no part of a router"):
        unpack_router(zlib.compress(pickle.dumps(Foreign())))
    with pytest.raises(RecordError, match="is no part of a router"):
        unpack_router(zlib.compress(pickle.dumps(Cluster)))


@pytest.mark.parametrize("kind", [CheckProcess, LogProducer])
def test_snapshot_refuses_project_classes_with_side_effects(kind: type) -> None:
    """Such classes start processes and connect to brokers."""
    with pytest.raises(RecordError, match="is no part of a router"):
        unpack_router(zlib.compress(pickle.dumps(kind)))


class Objects:
    """Build an array whose bytes are taken for addresses of objects."""

    def __reduce__(self) -> tuple[object, ...]:
        return np.ndarray, ((1,), np.dtype("O"), (0xDEADBEEF).to_bytes(8, "little"))


class OfObjects:
    """Build the same array by the one function that is allowed."""

    def __reduce__(self) -> tuple[object, ...]:
        return numbers, ("|O", (1,), b"\xef" * 8)


@pytest.mark.parametrize(
    ("evil", "message"), [(Objects, "ndarray is no part"), (OfObjects, "numbers")]
)
def test_snapshot_refuses_arrays_of_object_pointers(evil: type, message: str) -> None:
    """A recording once crashed the process at an address of its choice."""
    with pytest.raises(RecordError, match=message):
        unpack_router(zlib.compress(pickle.dumps(frozenset([evil()]))))


def test_snapshot_bounds_decompressed_size() -> None:
    zeros = pickle.dumps(bytes(64 << 20))
    with pytest.raises(RecordError, match="expected a whole state of at most 16777216 bytes"):
        unpack_router(zlib.compress(zeros))


def test_snapshot_refuses_invalid_or_truncated_state() -> None:
    whole = pack_router(Router("router-a", RouterSettings()))
    assert unpack_router(whole).router_id == "router-a"
    for state in (b"", b"nothing", whole[:-20], zlib.compress(pickle.dumps({"a": 1}))):
        with pytest.raises(RecordError, match="router"):
            unpack_router(state)
