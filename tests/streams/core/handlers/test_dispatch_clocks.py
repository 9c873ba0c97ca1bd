"""Clocks that differ between hosts: no KV handle crosses them, and nothing else suffers."""

import pytest

from schemas.fleet import CLOCK_MARGIN_MS
from schemas.records import Mode, Orchestration, PhaseKind
from tests.streams.core.router_harness import RouterHarness
from tests.streams.core.router_setups import pairs, split


def apart(on: RouterHarness, ahead_ms: int) -> RouterHarness:
    """The decode worker's clock is so far ahead of the broker's, and that was measured."""
    on.clocks_ms["d0"] = ahead_ms
    on.beat(on.workers["d0"])
    return on


@pytest.mark.parametrize("ahead_ms", [CLOCK_MARGIN_MS + 1, -CLOCK_MARGIN_MS - 1])
def test_router_sends_no_kv_handle_across_differing_clocks(ahead_ms: int) -> None:
    """Blocks that are read too late hold another prompt."""
    on = apart(split(), ahead_ms)
    on.request("r1")
    on.phase(on.works[0], PhaseKind.PREFILL_DONE)
    decode = on.works[-1]
    assert (decode.kv, decode.mode, decode.worker_id) == (None, Mode.LOCAL, "d0")
    assert [(order.worker_id, order.void) for order in on.cancels] == [("p0", True)]
    on.outcome(decode)
    assert not on.router.view()


@pytest.mark.parametrize("ahead_ms", [CLOCK_MARGIN_MS, -CLOCK_MARGIN_MS])
def test_router_sends_kv_handle_within_clock_margin(ahead_ms: int) -> None:
    on = apart(split(), ahead_ms)
    on.request("r1")
    on.phase(on.works[0], PhaseKind.PREFILL_DONE)
    assert on.works[-1].kv is not None and on.works[-1].mode is Mode.REMOTE


@pytest.mark.parametrize("wish", [Orchestration.CONCURRENT, Orchestration.DECODE_FIRST])
def test_router_makes_no_pair_of_workers_with_differing_clocks(wish: Orchestration) -> None:
    on = apart(pairs(wish), CLOCK_MARGIN_MS + 1)
    on.request("r1")
    assert on.works[-1].orchestration is Orchestration.PREFILL_FIRST
    on.clocks_ms.clear()
    on.beat(on.workers["d0"])
    on.request("r2")
    assert on.works[-1].orchestration is wish
