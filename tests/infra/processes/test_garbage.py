"""The collector waits for the end of a start, and goes on then."""

import asyncio
import contextlib
import gc
from collections.abc import Iterator

import pytest

from infra.processes import garbage
from tests.virtual_time import virtual


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Other tests have their own collector."""
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.enable()


@virtual
async def test_collector_resumes_after_freezing_start_objects() -> None:
    garbage.defer_gc(asyncio.get_running_loop())
    assert not gc.isenabled()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), 4)
    assert gc.isenabled() and gc.get_freeze_count()
