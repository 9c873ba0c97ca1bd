"""Searches during an answer, as the router hands them on: to later attempts, over takeovers."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.records import Orchestration, PhaseKind, Work, WorkPhase
from streams.core.effects import Dispatch, NotifyRetrieval
from tests.streams.builders import passage, probing, retrieval
from tests.streams.core.router_harness import RouterHarness
from tests.streams.core.router_setups import pairs, replicas, split, work_of


def answering(on: RouterHarness, **changes: Any) -> Work:
    """A request that may search while it is answered, up to its decode worker."""
    wanted = retrieval(on.now_ms + 500, probing=probing(), **changes)
    on.request("r1", retrieval=wanted, tenant="acme")
    on.retrieved("r1", passage(1), passage(2))
    if on.works[-1].phase is WorkPhase.PREFILL:
        on.phase(on.works[-1], PhaseKind.PREFILL_DONE)
    return on.works[-1]


def fail(on: RouterHarness, work: Work) -> Work:
    """The worker fails the attempt; what its successor gets."""
    on.phase(work, PhaseKind.FAILED)
    if on.works[-1].phase is WorkPhase.PREFILL:
        on.phase(on.works[-1], PhaseKind.PREFILL_DONE)
    assert on.works[-1].attempt == work.attempt + 1
    return on.works[-1]


@pytest.mark.parametrize("fleet", [split, replicas])
def test_decode_gets_what_it_needs_to_search_and_prefill_does_not(fleet: Any) -> None:
    on: RouterHarness = fleet()
    probes = answering(on).probes
    assert probes is not None and probes.retrieval == on.accepted["r1"].retrieval
    assert (probes.tenant, probes.known_passages) == ("acme", ("d1#0", "d2#0"))
    assert (probes.inserts, probes.decided) == ((), 0)
    prefills = [work for work in on.works if work.phase is WorkPhase.PREFILL]
    assert all(work.probes is None for work in prefills)


@pytest.mark.parametrize("way", [Orchestration.DECODE_FIRST, Orchestration.CONCURRENT])
def test_in_a_pair_only_decode_searches(way: Orchestration) -> None:
    on = pairs(way)
    on.request("r1", retrieval=retrieval(on.now_ms + 500, probing=probing()))
    on.retrieved("r1", passage(1))
    decode = work_of(on, WorkPhase.DECODE)
    assert decode.probes is not None
    if way is Orchestration.DECODE_FIRST:
        on.phase(decode, PhaseKind.KV_ALLOCATED)
    assert work_of(on, WorkPhase.PREFILL).probes is None


def test_a_request_that_wants_no_probes_gets_none() -> None:
    on = replicas()
    on.request("r1", retrieval=retrieval(on.now_ms + 500))
    on.retrieved("r1", passage(1))
    on.request("r2")
    assert [work.probes for work in on.works] == [None, None]


def test_a_later_attempt_puts_in_what_the_client_has_and_asks_from_there() -> None:
    on = replicas(2)
    first = answering(on)
    assert on.probed(first, 1, passage(3)) == []
    on.probed(first, 2)
    on.probed(first, 2, passage(9))  # the first counts
    probes = fail(on, first).probes
    assert probes is not None and probes.decided == 2
    assert [(each.at, each.tokens) for each in probes.inserts] == [
        (8, passage(3).tokens),
        (16, b""),
    ]
    assert probes.known_passages == ("d1#0", "d2#0", "d3#0")


def test_the_reader_hears_of_it_again_before_the_later_attempt() -> None:
    """The worker that put it in may have died before it told."""
    on = replicas(2)
    first = answering(on)
    on.probed(first, 1, passage(3))
    on.probed(first, 2)
    effects = on.phase(first, PhaseKind.FAILED)
    kinds = [type(each) for each in effects if isinstance(each, NotifyRetrieval | Dispatch)]
    assert kinds[-2:] == [NotifyRetrieval, Dispatch]
    told = [each for each in on.told if each.probe]
    assert [(each.probe, each.seq, each.tokens) for each in told] == [(1, 8, 3)]
    assert [each.passage_id for each in told[0].citations] == ["d3#0"]


def test_what_is_read_when_the_attempt_is_given_up_already_counts_all_the_same() -> None:
    """The client may have tokens that follow it: that is read from another topic."""
    on = replicas(1)
    first = answering(on)
    worker = on.workers["x0"]
    worker.window = 0
    on.beat(worker)
    on.phase(first, PhaseKind.FAILED)
    on.probed(first, 1, passage(3))
    worker.window = 2
    on.beat(worker)
    probes = on.works[-1].probes
    assert on.works[-1].attempt == 2 and probes is not None and probes.decided == 1


def test_an_attempt_that_was_given_up_has_no_say_once_its_successor_has_probed() -> None:
    on = replicas(2)
    first = answering(on)
    second = fail(on, first)
    on.probed(second, 1, passage(4))
    on.probed(first, 1, passage(3))
    on.probed(first, 2, passage(5))
    probes = fail(on, second).probes
    assert probes is not None and [each.tokens for each in probes.inserts] == [passage(4).tokens]


@pytest.mark.parametrize("fleet", [split, replicas])
def test_the_next_router_knows_the_same(fleet: Any) -> None:
    """Live state equals a rebuild, and goes on alike: also where the request waits to be placed."""
    on: RouterHarness = fleet()
    work = answering(on)
    on.probed(work, 1, passage(3))
    on.probed(work, 2)
    view = on.router.view()
    assert view == on.rebuilt().view()
    assert view != _without_probes(on).view(), "a view tells of probes"
    on.taken_over()
    on.probed(work, 3, passage(4))
    probes = fail(on, work).probes
    assert probes is not None and probes.decided == 3
    assert [each.at for each in probes.inserts] == [8, 16, 24]
    assert on.router.view() == on.rebuilt().view()


def _without_probes(on: RouterHarness) -> Any:
    log = [each for each in on.log if not getattr(getattr(each, "retrieved", None), "probe", 0)]
    return on.rebuilt(log)


def test_what_stands_in_the_answer_is_no_part_of_the_sessions_next_prompt() -> None:
    on = replicas(1)
    work = answering(on)
    on.probed(work, 1, passage(3))
    on.outcome(work)
    later = retrieval(on.now_ms + 500, at=15, tail_at=18, history_tokens=14, room_tokens=99)
    on.request("t2", 20, session_id="s-r1", tenant="acme", retrieval=later)
    assert [insert.at for insert in on.asks[-1].history] == [4, 8]


def test_a_probe_is_no_answer_to_the_search_for_the_prompt() -> None:
    on = replicas(1)
    wanted = retrieval(on.now_ms + 500, probing=probing())
    on.request("r1", retrieval=wanted)
    assert on.retrieved("r1", passage(1), attempt=1, probe=1, tokens=b"aaaa") == []
    assert not on.works and on.router.view() == on.rebuilt().view()
    on.retrieved("r1", replace(passage(2)))
    assert on.works
