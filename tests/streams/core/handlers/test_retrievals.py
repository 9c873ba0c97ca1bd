"""What is searched for a request before it is queued: every way in which that may end."""

from typing import Any

import pytest

from schemas.errors import DeadlineExceeded
from schemas.records import Cancellation, OutcomeKind, PhaseKind, Quoted, Retrieved, Work
from schemas.rules.tokens import pack_tokens, token_count, unpack_tokens
from streams.core.effects import (
    Decide,
    Dispatch,
    End,
    NotifyRetrieval,
    RecordUsage,
    SkipRetrieval,
    StartRetrieval,
)
from streams.core.events import (
    CancellationArrived,
    PartitionLost,
    PhaseArrived,
    RetrievedArrived,
    Tick,
)
from streams.core.handlers import retrievals
from streams.core.states import State
from tests.streams import builders
from tests.streams.builders import ROUTER, passage, retrieval
from tests.streams.core.router_harness import PARTITION, RouterHarness
from tests.streams.core.router_setups import replicas, split, state_of

BY_MS = 500  # after the request's arrival


def asking(**settings: Any) -> RouterHarness:
    """A router with a request that waits for a search."""
    on = split(**settings)
    ask(on, "r1")
    return on


def ask(on: RouterHarness, request_id: str, **changes: Any) -> list[Any]:
    search = retrieval(on.now_ms + BY_MS, **changes)
    return on.request(request_id, retrieval=search, session_id="s-" + request_id)


def test_router_searches_first_and_places_with_passages() -> None:
    """The search starts at once, and the reader's notice precedes any dispatch."""
    on = split()
    (start,) = ask(on, "r1")
    assert isinstance(start, StartRetrieval) and start.request == on.accepted["r1"]
    assert state_of(on, "r1") is State.RETRIEVING and not len(
        on.router.tables.queues.of("tiny").admission
    )
    notice, placed, work = on.retrieved("r1", passage(1), passage(2))
    assert isinstance(notice, NotifyRetrieval) and notice.gateway_partition == 0
    assert [citation.passage_id for citation in notice.retrieved.citations] == ["d1#0", "d2#0"]
    assert isinstance(placed, Decide) and placed.decision.prompt_tokens == 10 + 11
    assert isinstance(work, Dispatch) and isinstance(work.record, Work)
    assert unpack_tokens(work.record.prompt_tokens)[:6] == [0, 1, 2, 3, 901, 1000]
    live = on.router.tables.requests.by_id["r1"]
    assert live.prompt_tokens == token_count(live.request.prompt_tokens) == 21
    assert live.case is not None and live.case.prompt_tokens == 21
    assert live.passages.notice is None, "its reader was told once"


def test_first_retrieved_record_counts() -> None:
    on = asking()
    on.retrieved("r1", passage(1))
    assert on.retrieved("r1", passage(2)) == []
    assert on.retrieved("nobody", passage(2)) == []
    on.request("plain")
    assert on.retrieved("plain", passage(2)) == []
    assert len(on.notices) == 1
    on.taken_over()
    assert on.router.view() == on.rebuilt().view()


def test_failed_search_continues_request_with_error_notice() -> None:
    on = asking()
    error = builders.phase(builders_work(on), PhaseKind.FAILED).error
    on.retrieved("r1", error=error, missing=(1,))
    assert on.notices[-1].error == error and on.notices[-1].missing_shards == 1
    assert on.works[-1].prompt_tokens == on.accepted["r1"].prompt_tokens


def builders_work(on: RouterHarness) -> Work:
    """Some work, of another request."""
    on.request("other")
    return on.works[-1]


def test_late_search_continues_request_once_log_says_so() -> None:
    """The router's own record counts and not its timer, so a rebuild sees the same."""
    on = asking()
    on.now_ms += BY_MS + 99
    assert on.apply(Tick()) == []
    on.now_ms += 1
    (written,) = on.apply(Tick())
    error = DeadlineExceeded("r1: nothing was found in time, 100 ms ago").to_wire()
    assert written == SkipRetrieval(
        Retrieved(
            request_id="r1",
            session_id="s-r1",
            router_id=ROUTER,
            error=error,
            asked_ms=on.accepted["r1"].arrived_ms,
            at_ms=on.now_ms,
        ),
        PARTITION,
    )
    assert state_of(on, "r1") is State.RETRIEVING
    on.now_ms += 10
    assert not [effect for effect in on.apply(Tick()) if isinstance(effect, SkipRetrieval)]  # once
    on.read()
    assert on.notices[-1].error == error
    assert on.works[-1].prompt_tokens == on.accepted["r1"].prompt_tokens
    assert on.retrieved("r1", passage(1)) == []  # too late


def test_late_result_counts_where_it_is_first_in_log() -> None:
    on = asking()
    on.pass_ms(1_000)
    assert len(on.on_the_way) == 1
    on.retrieved("r1", passage(1))
    assert on.read() == []
    assert on.notices[-1].citations and token_count(on.works[-1].prompt_tokens) > 10
    on.taken_over()
    assert on.router.view() == on.rebuilt().view()


def test_skip_record_carries_history_of_earlier_turns() -> None:
    on = replicas(1)
    on.request("t1", session_id="s", retrieval=retrieval(on.now_ms + BY_MS))
    on.retrieved("t1", passage(1))
    on.outcome(on.works[-1])
    later = retrieval(on.now_ms + BY_MS, at=15, tail_at=18, history_tokens=14, room_tokens=99)
    on.request("t2", session_id="s", tokens=20, retrieval=later)
    assert on.asks[-1].history
    on.pass_ms(2_000)
    (written,) = on.on_the_way
    assert isinstance(written, Retrieved) and written.history == on.asks[-1].history


@pytest.mark.parametrize("late_ms", [0, 1, 10_000])
def test_router_starts_no_search_past_its_deadline(late_ms: int) -> None:
    """This happens after an outage of the log."""
    on = split()
    (written,) = on.request("r1", retrieval=retrieval(on.now_ms - late_ms))
    assert isinstance(written, SkipRetrieval) and not on.asks
    on.read()
    assert on.notices[-1].error is not None and on.works


def test_router_skips_searches_over_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrievals, "RETRIEVALS_MAX", 2)
    on = split()
    for number in range(4):
        ask(on, f"r{number}")
    assert [ask.request.request_id for ask in on.asks] == ["r0", "r1"]
    errors = [record.error for record in on.on_the_way if isinstance(record, Retrieved)]
    assert [error and error.code for error in errors] == ["queue_full"] * 2
    assert errors[0] is not None and "r2: 2 searches are under way" in errors[0].message
    on.read()
    assert on.router.tables.requests.retrieving == 2
    on.retrieved("r0")
    ask(on, "r4")
    assert len(on.asks) == 3
    on.cancel("r4")
    on.retrieved("r1")
    assert not on.router.tables.requests.retrieving


def test_cancellation_ends_request_during_search() -> None:
    on = asking()
    *_, end, used = on.cancel("r1")
    assert isinstance(used, RecordUsage)
    assert isinstance(end, End) and end.outcome.kind is OutcomeKind.CANCELLED
    assert on.retrieved("r1", passage(1)) == [] and not on.notices
    on.pass_ms(2_000)
    assert not on.on_the_way and not on.works
    on.taken_over()
    assert not on.router.view()


def test_cancellation_before_request_prevents_search() -> None:
    on = split()
    on.cancel("r1")
    ask(on, "r1")
    assert not on.asks and on.outcomes["r1"].kind is OutcomeKind.CANCELLED


def test_deadline_ends_request_during_search() -> None:
    on = split()
    on.request("r1", retrieval=retrieval(on.now_ms + 9_000), deadline_ms=on.now_ms + 1_000)
    on.pass_ms(1_500)
    assert on.outcomes["r1"].kind is OutcomeKind.EXPIRED
    on.pass_ms(10_000)
    assert not on.on_the_way


def test_router_ignores_worker_phases_during_search() -> None:
    on = asking()
    work = builders_work(on)
    for kind, worker in ((PhaseKind.FAILED, "p0"), (PhaseKind.PREFILL_DONE, "")):
        epoch = int(bool(worker))
        fields = {"request_id": "r1", "attempt": 0, "worker_id": worker, "worker_epoch": epoch}
        forged = builders.phase(work, kind, on.now_ms, **fields)
        assert on.record(PhaseArrived(forged, PARTITION)) == []
    live = on.router.tables.requests.by_id["r1"]
    assert (live.state, live.attempt.sent_tokens) == (State.RETRIEVING, 0)


def test_queued_request_keeps_its_deadline_after_search() -> None:
    """The deadline of the search is not that of the request."""
    on = replicas(1, window=0)
    ask(on, "r1")
    on.retrieved("r1", passage(1))
    on.pass_ms(20_000)
    assert state_of(on, "r1") is State.QUEUED and not on.on_the_way
    on.pass_ms(41_000)
    assert on.outcomes["r1"].kind is OutcomeKind.EXPIRED


# Takeovers


def test_takeover_repeats_search_without_result_in_log() -> None:
    """A result of the last router may still come: the first counts."""
    on = asking()
    on.taken_over()
    assert [ask.request.request_id for ask in on.asks] == ["r1", "r1"]
    on.retrieved("r1", passage(1))  # of the last router
    assert on.retrieved("r1", passage(2)) == []
    assert 1000 in unpack_tokens(on.works[-1].prompt_tokens)


def test_takeover_skips_search_past_its_deadline() -> None:
    """This holds where the last router had written a skip that was not read, too."""
    on = asking()
    on.pass_ms(BY_MS + 500)
    on.taken_over()
    on.taken_over()
    assert len(on.on_the_way) == 3 and len(on.asks) == 1
    on.read()
    assert len(on.notices) == 1 and len(on.works) == 1
    on.taken_over()
    assert on.router.view() == on.rebuilt().view()


@pytest.mark.parametrize("placed", [True, False])
def test_takeover_has_same_prompt_and_repeats_notice(placed: bool) -> None:
    """The last router may have died before it sent the notice."""
    on = replicas(1, window=1 if placed else 0)
    ask(on, "r1")
    on.retrieved("r1", passage(1))
    before = on.router.view()
    on.workers["x0"].window = 0
    on.beat(on.workers["x0"])
    on.taken_over()
    assert on.router.view() == before and len(on.notices) == 2
    assert on.router.tables.requests.by_id["r1"].prompt_tokens == 17
    on.workers["x0"].window = 2
    on.beat(on.workers["x0"])
    assert len({work.prompt_tokens for work in on.works}) == 1
    assert token_count(on.works[-1].prompt_tokens) == 17


def test_takeover_ends_request_cancelled_during_search() -> None:
    on = asking()
    cancellation: Cancellation = builders.cancellation("r1", at_ms=on.now_ms)
    on.log.append(CancellationArrived(cancellation, PARTITION))
    on.taken_over()
    assert on.outcomes["r1"].kind is OutcomeKind.CANCELLED and len(on.asks) == 1


def test_takeover_keeps_prompt_placed_without_retrieved_record() -> None:
    """An older router placed it, and the log has no result."""
    on = asking()
    on.retrieved("r1")
    on.log = [event for event in on.log if not isinstance(event, RetrievedArrived)]
    on.taken_over()
    assert state_of(on, "r1") is State.PREFILLING and len(on.asks) == 1
    on.workers["p0"].window = 0
    on.beat(on.workers["p0"])
    on.phase(on.works[-1], PhaseKind.REFUSED)
    on.log = [event for event in on.log if not isinstance(event, RetrievedArrived)]
    on.taken_over()
    assert state_of(on, "r1") is State.QUEUED and len(on.asks) == 1


# Sessions


def test_next_turn_prompt_extends_prompt_of_last_turn() -> None:
    on = replicas(1)
    first = list(range(10))
    on.request("t1", session_id="s", retrieval=retrieval(on.now_ms + BY_MS))
    on.retrieved("t1", passage(1))
    on.outcome(on.works[-1])
    later: dict[str, Any] = {
        "session_id": "s",
        "tokens": 20,
        "retrieval": retrieval(
            on.now_ms + BY_MS, at=15, tail_at=18, history_tokens=14, room_tokens=99
        ),
    }
    on.request("t2", **later)
    assert [insert.at for insert in on.asks[-1].history] == [4, 8]
    on.retrieved("t2", passage(2))
    before, prompt = on.works[-2].prompt_tokens, on.works[-1].prompt_tokens
    assert prompt.startswith(before) and len(before) > 4 * len(first)
    on.taken_over()  # the next router knows of the prompt under way, and of no other turn
    on.outcome(on.works[-1])
    on.request("t3", **later)
    assert on.asks[-1].history == ()


def test_skipped_search_leaves_out_quotes_of_earlier_turns() -> None:
    """No shard could say whether the documents still say that; it does not come back."""
    on = replicas(1)
    on.request("t1", session_id="s", retrieval=retrieval(on.now_ms + BY_MS))
    on.retrieved("t1", passage(1))
    changes: dict[str, Any] = {"at": 15, "history_tokens": 14, "room_tokens": 99}
    on.request("t2", session_id="s", tokens=20, retrieval=retrieval(on.now_ms, **changes))
    on.read()
    assert on.works[-1].prompt_tokens == pack_tokens(range(20))
    assert on.notices[-1].error is not None and on.notices[-1].tokens == 0
    later = retrieval(on.now_ms + BY_MS, **changes)
    on.request("t3", session_id="s", tokens=20, retrieval=later)
    assert on.asks[-1].history == ()


def test_changed_document_is_not_in_next_prompts() -> None:
    """What other turns quoted stays, and the next router has the same prompt."""
    on = replicas(1, window=9)
    on.request("t1", session_id="s", retrieval=retrieval(on.now_ms + BY_MS))
    on.retrieved("t1", passage(1, content="old"))
    place: dict[str, Any] = {"room_tokens": 99, "history_tokens": 14}
    second = retrieval(on.now_ms + BY_MS, at=15, tail_at=18, **place)
    on.request("t2", session_id="s", tokens=20, retrieval=second)
    history = on.asks[-1].history
    assert {quote for insert in history for quote in insert.quoted} == {
        Quoted(document_id="d1", content="old")
    }
    on.retrieved("t2", passage(2), changed=("d1",))
    prompt = unpack_tokens(on.works[-1].prompt_tokens)
    assert 2000 in prompt and 1000 not in prompt
    assert prompt[:15] == list(range(15)), "nor what stood around it"
    third = retrieval(on.now_ms + BY_MS, at=28, tail_at=29, **{**place, "history_tokens": 24})
    on.request("t3", session_id="s", tokens=30, retrieval=third)
    assert [insert.at for insert in on.asks[-1].history] == [15, 18]
    on.retrieved("t3", passage(3))
    prompt = unpack_tokens(on.works[-1].prompt_tokens)
    assert {2000, 3000} < set(prompt) and 1000 not in prompt
    on.taken_over()
    assert on.router.view() == on.rebuilt().view()


def test_partition_loss_drops_histories() -> None:
    on = asking()
    on.retrieved("r1", passage(1))
    assert len(on.router.tables.histories) == 1
    on.apply(PartitionLost(PARTITION))
    assert not len(on.router.tables.histories)
