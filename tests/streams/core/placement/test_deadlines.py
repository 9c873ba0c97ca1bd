"""Deadlines of answers under way and of the request that comes: where it goes so that they hold."""

import pytest

from schemas.records import Mode, Reason, Role
from streams.core.fleet.workers import ActiveAnswer
from streams.core.placement.selection import MARGIN
from tests.streams.builders import T0
from tests.streams.core.placement.placer_fixture import PlacerFixture, case, pair, session

# Nothing is measured: a step takes 10 ms, and 0.02 ms for each thousand tokens that it reads.
TOKENS, STEP_MS = 1_000, 10.0


def holds_answer(scene: PlacerFixture, worker_id: str, deadline_ms: int, **changes: int) -> None:
    """A decode worker answers a request of this router's."""
    values = {"prompt_tokens": 100, "max_tokens": TOKENS, "begins_ms": T0, **changes}
    answer = ActiveAnswer(f"on {worker_id}", deadline_ms=deadline_ms, **values)
    scene.fleet.add_request(scene.worker(worker_id), 0, answer)


def spent_ms(tokens: int) -> int:
    """What so many tokens of an answer take alone, of which half are expected to come."""
    return round(tokens / 2 * STEP_MS)


@pytest.mark.parametrize("policy", ["learned", "conditional", "static"])
@pytest.mark.parametrize("slack", [MARGIN + 0.02, 2.0], ids=["near", "far"])
def test_placer_sends_long_context_where_deadlines_hold(policy: str, slack: float) -> None:
    """d1 has less to do, and an answer that just comes in time."""
    scene = pair(decodes=2, policy=policy)
    holds_answer(scene, "d0", T0 + 600_000)
    scene.fleet.add_request(scene.worker("d0"), 0)
    holds_answer(scene, "d1", T0 + round(slack * spent_ms(TOKENS)))
    placement = scene.place(case(60_000))
    assert placement is not None and placement.decode is scene.worker("d0" if slack < 2 else "d1")


def test_placer_ignores_answer_that_is_late_either_way() -> None:
    scene = pair(decodes=2, policy="learned")
    scene.fleet.add_request(scene.worker("d0"), 0)
    scene.fleet.add_request(scene.worker("d0"), 0)
    holds_answer(scene, "d1", T0 + spent_ms(TOKENS) // 2)
    placement = scene.place(case(60_000))
    assert placement is not None and placement.decode is scene.worker("d1")


def test_worker_forgets_deadline_of_ended_answer() -> None:
    scene = pair(decodes=1)
    holds_answer(scene, "d0", T0 + spent_ms(TOKENS))
    worker = scene.worker("d0")
    assert (worker.batch_tokens, len(worker.answers)) == (100, 1)
    scene.fleet.release(worker.life, Role.DECODE, 0, "on d0")
    assert (worker.batch_tokens, len(worker.answers)) == (0, 0)


@pytest.mark.parametrize(
    ("deadline_ms", "mode", "reason"),
    [
        (600_000, Mode.LOCAL, Reason.PREFILL_QUEUE_LONG),
        (round(1_000 * MARGIN) + 2, Mode.REMOTE, Reason.DEADLINE_NEAR),  # it would lose 4 ms
        (1_100, Mode.REMOTE, Reason.DEADLINE_NEAR),  # the margin is gone, hope is not
        (900, Mode.LOCAL, Reason.PREFILL_QUEUE_LONG),  # late either way
    ],
)
def test_placer_overrules_policy_to_keep_deadline(
    deadline_ms: int, mode: Mode, reason: Reason
) -> None:
    """The prompt would be computed beside an answer, whose stream it delays."""
    scene = pair(policy="conditional", max_local_prefill_tokens=0, max_prefill_queue=0.0)
    scene.estimates.decode.coefficients = [STEP_MS, 0.0, 0.0, 1.0, 0.0, 0.0]
    holds_answer(scene, "d0", T0 + deadline_ms, max_tokens=200)
    placement = scene.place(case(2_040, session("d0", 2_001)))
    assert placement is not None
    assert (placement.mode, placement.reason) == (mode, reason)


@pytest.mark.parametrize(("waiting_tokens", "worker_id"), [(0, "d0"), (30_000, "d1")])
def test_placer_counts_delay_by_waiting_prompts(waiting_tokens: int, worker_id: str) -> None:
    """d0 has an answer that ends in time, unless that many tokens are computed before."""
    scene = pair(decodes=2, policy="static")
    scene.estimates.decode.coefficients = [STEP_MS, 0.0, 0.02, 1.0, 0.0, 0.0]
    holds_answer(scene, "d0", T0 + round(2.0 * spent_ms(TOKENS)))
    scene.pools.occupy(scene.worker("d0"), T0 + waiting_tokens, append_ms_per_token=1.0)
    placement = scene.place(case(2_000, session("d0", 1_000)))
    assert placement is not None and placement.decode is scene.worker(worker_id)


def test_placer_keeps_deadline_of_request_itself() -> None:
    """The session's worker is slow; the other one would have to be sent the history."""
    scene = pair(decodes=2, policy="static")
    holds_answer(scene, "d0", T0 + 600_000, prompt_tokens=400_000)
    for slack, worker_id in ((3.0, "d0"), (MARGIN + 0.2, "d1")):
        deadline_ms = T0 + round(slack * spent_ms(TOKENS))
        request_case = case(100, session("d0", 50), deadline_ms=deadline_ms, max_tokens=TOKENS)
        placement = scene.place(request_case)
        assert placement is not None and placement.decode is scene.worker(worker_id)


@pytest.mark.parametrize("room_tokens", [100_000, 10_000])
def test_placer_sends_request_where_its_kv_has_room(room_tokens: int) -> None:
    """d1 has fewer requests, but this one would wait there until one of them ends."""
    scene = pair(decodes=2, policy="static")
    scene.estimates.answer_tokens = 100.0
    scene.estimates.speeds = scene.estimates._speeds()
    for _ in range(3):
        scene.fleet.add_request(scene.worker("d0"), 0)
    holds_answer(scene, "d1", T0 + 600_000, prompt_tokens=9_000)
    worker = scene.worker("d1")
    worker.capacity_tokens = room_tokens
    scene.pools.pools[Role.DECODE].update(worker)
    placement = scene.place(case(2_000))
    assert placement is not None
    assert placement.decode is scene.worker("d1" if room_tokens > 11_000 else "d0")


def test_placer_compares_few_workers_where_all_miss_deadlines() -> None:
    """Each has an answer that comes late with this one; none of those compared is better."""
    scene = pair(decodes=6, policy="static")
    for number in range(6):
        holds_answer(scene, f"d{number}", T0 + round((MARGIN + 0.02) * spent_ms(TOKENS)))
    placement = scene.place(case(60_000))
    assert placement is not None and placement.decode is scene.worker("d0")
