"""Beginnings of prompts that are computed while the rest is searched for: where, and when not."""

from typing import Any

import pytest

from schemas.records import PhaseKind, Role
from schemas.rules.tokens import token_count
from streams.core.requests.live import WarmedPrefix
from tests.streams.builders import passage, retrieval
from tests.streams.core.router_harness import RouterHarness
from tests.streams.core.router_setups import replicas, split

LONG = 400  # tokens of a prompt, of which all but the last ten are a fixed part


def ask(on: RouterHarness, request_id: str = "r1", tokens: int = LONG, **changes: Any) -> None:
    search = retrieval(on.now_ms + 500, at=tokens - 10, tail_at=tokens - 5, room_tokens=60)
    on.request(request_id, tokens, **{"retrieval": search, **changes})


@pytest.mark.parametrize(("fleet", "worker"), [(split, "p0"), (replicas, "x0")])
def test_router_warms_worker_that_would_get_prompt(fleet: Any, worker: str) -> None:
    on: RouterHarness = fleet(warm_tokens_min=300)
    ask(on)
    (warm,) = on.warms
    request = on.accepted["r1"]
    assert (warm.worker_id, warm.worker_epoch, warm.request_id) == (worker, 1, "r1")
    assert request.retrieval is not None and warm.deadline_ms == request.retrieval.by_ms
    assert (warm.session_id, warm.model) == (request.session_id, request.model)
    on.retrieved("r1", passage(1))
    work = on.works[-1]
    assert work.worker_id == worker and work.prompt_tokens.startswith(warm.prompt_tokens)
    assert token_count(warm.prompt_tokens) == LONG - 10


@pytest.mark.parametrize("warms", [True, False])
def test_router_places_prompt_on_warmed_worker(warms: bool) -> None:
    """It does so though another worker's turn has come, and the decision counts the prefix."""
    on = split(prefills=2, warm_tokens_min=300 * warms)
    ask(on)
    first = on.warms[0].worker_id if warms else "p0"
    on.request("other")
    assert on.works[-1].worker_id == first == "p0"
    on.retrieved("r1", passage(1))
    assert on.works[-1].worker_id == ("p0" if warms else "p1")
    cached = {
        candidate.worker_id: candidate.cached_tokens for candidate in on.decisions[-1].candidates
    }
    assert cached["p0"] == (LONG - 10) * warms


@pytest.mark.parametrize("tokens_min", [0, LONG - 9])
def test_router_warms_nothing_below_minimum_or_when_off(tokens_min: int) -> None:
    on = split(warm_tokens_min=tokens_min)
    ask(on)
    assert not on.warms and on.router.tables.requests.by_id["r1"].warm is None


def test_router_warms_prefix_once_for_choices_of_call() -> None:
    on = split(warm_tokens_min=300)
    for choice in range(3):
        ask(on, f"c-{choice}", choice=choice, parent_id="c")
    assert [warm.request_id for warm in on.warms] == ["c-0"]


def test_router_warms_nothing_without_credit_or_search() -> None:
    on = RouterHarness(warm_tokens_min=300)
    on.worker("p0", Role.PREFILL, window=0)
    on.worker("d0", Role.DECODE, window=2)
    ask(on)
    on.worker("p1", Role.PREFILL, window=2)
    on.request("plain", LONG)
    search = retrieval(on.now_ms, at=LONG - 10)
    on.request("late", LONG, retrieval=search)
    assert not on.warms


def test_router_warms_session_worker_only_for_enough_new_tokens() -> None:
    on = replicas(2, warm_tokens_min=300)
    ask(on, "t1", session_id="s")
    on.retrieved("t1")
    on.outcome(on.works[-1])
    home = on.works[-1].worker_id
    ask(on, "t2", LONG + 100, session_id="s")
    assert len(on.warms) == 1
    on.retrieved("t2")
    on.outcome(on.works[-1])
    ask(on, "t3", 3 * LONG, session_id="s")
    assert [warm.worker_id for warm in on.warms] == [home, home]


@pytest.mark.parametrize("policy", ["conditional", "static"])
def test_policy_decides_whether_decode_worker_is_warmed(
    policy: str,
) -> None:
    on = split(warm_tokens_min=300, policy=policy)
    ask(on, "t1", 20, session_id="s")
    on.retrieved("t1")
    on.phase(on.works[-1], PhaseKind.PREFILL_DONE)
    on.outcome(on.works[-1])
    ask(on, "t2", LONG, session_id="s")
    assert on.warms[-1].worker_id == ("p0" if policy == "static" else "d0")


@pytest.mark.parametrize("queue_tokens", [0, 1_000_000])
def test_router_warms_replica_when_prefill_queue_is_long(queue_tokens: int) -> None:
    on = split(warm_tokens_min=300)
    on.worker("x0", Role.REPLICA, window=4)
    if queue_tokens:
        on.request("before", queue_tokens, policy="static")
        assert on.works[-1].worker_id == "p0"
    ask(on)
    on.retrieved("r1")
    assert on.warms[-1].worker_id == on.works[-1].worker_id == ("x0" if queue_tokens else "p0")


def test_restarted_worker_counts_no_warmed_prefix() -> None:
    on = replicas(1, warm_tokens_min=300)
    ask(on)
    live = on.router.tables.requests.by_id["r1"]
    assert live.warm == WarmedPrefix(life=("x0", 1), tokens=LONG - 10)
    on.worker("x0", Role.REPLICA)
    on.retrieved("r1", passage(1))
    (chosen,) = on.decisions[-1].candidates
    assert chosen.cached_tokens == 0 and on.works[-1].worker_epoch == 2


def served(tokens_min: int) -> RouterHarness:
    """Some requests from their arrival to their end, with an attempt that fails and a takeover."""
    on = replicas(2, warm_tokens_min=tokens_min)
    for number in range(4):
        ask(on, f"r{number}", LONG + number)
        on.retrieved(f"r{number}", passage(1 + number))
    on.workers["x0"].silent = True
    on.pass_ms(4_000)
    on.taken_over()
    for work in on.work_in_flight():
        on.outcome(work)
    return on


def test_warming_changes_no_prompt_notice_or_outcome() -> None:
    """Views of the next router are the same with warming and without, too."""
    without, warmed = served(0), served(1)
    assert warmed.warms and not without.warms
    assert warmed.prompts == without.prompts and warmed.notices == without.notices
    kinds = [
        {name: outcome.kind for name, outcome in on.outcomes.items()} for on in (without, warmed)
    ]
    assert kinds[0] == kinds[1] and len(kinds[0]) == 4
    views = [on.router.view() for on in (without, warmed)]
    assert views[0] == views[1]
