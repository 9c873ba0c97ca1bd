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
    search = retrieval(on.now_ms + 500, probing=probing(), **changes)
    on.request("r1", retrieval=search, tenant="acme")
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
def test_decode_work_has_probes_and_prefill_work_has_none(fleet: Any) -> None:
    on: RouterHarness = fleet()
    probes = answering(on).probes
    assert probes is not None and probes.retrieval == on.accepted["r1"].retrieval
    assert (probes.tenant, probes.known_passages) == ("acme", ("d1#0", "d2#0"))
    assert (probes.inserts, probes.decided) == ((), 0)
    prefills = [work for work in on.works if work.phase is WorkPhase.PREFILL]
    assert all(work.probes is None for work in prefills)


@pytest.mark.parametrize("way", [Orchestration.DECODE_FIRST, Orchestration.CONCURRENT])
def test_pair_gives_probes_to_decode_only(way: Orchestration) -> None:
    on = pairs(way)
    on.request("r1", retrieval=retrieval(on.now_ms + 500, probing=probing()))
    on.retrieved("r1", passage(1))
    decode = work_of(on, WorkPhase.DECODE)
    assert decode.probes is not None
    if way is Orchestration.DECODE_FIRST:
        on.phase(decode, PhaseKind.KV_ALLOCATED)
    assert work_of(on, WorkPhase.PREFILL).probes is None


def test_request_without_probing_gets_no_probes() -> None:
    on = replicas()
    on.request("r1", retrieval=retrieval(on.now_ms + 500))
    on.retrieved("r1", passage(1))
    on.request("r2")
    assert [work.probes for work in on.works] == [None, None]


def test_next_attempt_gets_inserts_and_known_passages() -> None:
    on = replicas(2)
    first = answering(on)
    assert on.probed(first, 1, passage(3)) == []
    on.probed(first, 2)
    on.probed(first, 2, passage(9))  # the first counts
    probes = fail(on, first).probes
    assert probes is not None and probes.decided == 2
    assert [(insert.at, insert.tokens) for insert in probes.inserts] == [
        (8, passage(3).tokens),
        (16, b""),
    ]
    assert probes.known_passages == ("d1#0", "d2#0", "d3#0")


def test_router_repeats_probe_notice_before_next_attempt() -> None:
    """The worker that inserted the passage may have died before it told the reader."""
    on = replicas(2)
    first = answering(on)
    on.probed(first, 1, passage(3))
    on.probed(first, 2)
    effects = on.phase(first, PhaseKind.FAILED)
    kinds = [type(effect) for effect in effects if isinstance(effect, NotifyRetrieval | Dispatch)]
    assert kinds[-2:] == [NotifyRetrieval, Dispatch]
    notices = [notice for notice in on.notices if notice.probe]
    assert [(notice.probe, notice.seq, notice.tokens) for notice in notices] == [(1, 8, 3)]
    assert [citation.passage_id for citation in notices[0].citations] == ["d3#0"]


def test_probe_record_counts_after_its_attempt_is_void() -> None:
    """The client may have tokens behind it, and that is read from another topic."""
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


def test_router_ignores_old_attempt_once_next_one_has_probed() -> None:
    on = replicas(2)
    first = answering(on)
    second = fail(on, first)
    on.probed(second, 1, passage(4))
    on.probed(first, 1, passage(3))
    on.probed(first, 2, passage(5))
    probes = fail(on, second).probes
    assert probes is not None and [insert.tokens for insert in probes.inserts] == [
        passage(4).tokens
    ]


@pytest.mark.parametrize("fleet", [split, replicas])
def test_takeover_restores_probes(fleet: Any) -> None:
    """Live state equals a rebuild and continues alike, also before the next placement."""
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
    assert [insert.at for insert in probes.inserts] == [8, 16, 24]
    assert on.router.view() == on.rebuilt().view()


def _without_probes(on: RouterHarness) -> Any:
    log = [event for event in on.log if not getattr(getattr(event, "retrieved", None), "probe", 0)]
    return on.rebuilt(log)


def test_next_turn_prompt_excludes_inserts_of_probes() -> None:
    on = replicas(1)
    work = answering(on)
    on.probed(work, 1, passage(3))
    on.outcome(work)
    later = retrieval(on.now_ms + 500, at=15, tail_at=18, history_tokens=14, room_tokens=99)
    on.request("t2", 20, session_id="s-r1", tenant="acme", retrieval=later)
    assert [insert.at for insert in on.asks[-1].history] == [4, 8]


def test_probe_record_answers_no_search_for_prompt() -> None:
    on = replicas(1)
    search = retrieval(on.now_ms + 500, probing=probing())
    on.request("r1", retrieval=search)
    assert on.retrieved("r1", passage(1), attempt=1, probe=1, tokens=b"aaaa") == []
    assert not on.works and on.router.view() == on.rebuilt().view()
    on.retrieved("r1", replace(passage(2)))
    assert on.works
