"""Policy `conditional`, case by case: later turns, first turns, and those whose worker is gone."""

import pytest

from schemas.records import Mode, Reason, Session
from tests.streams.core.placement.placer_fixture import case, pair, session


@pytest.mark.parametrize(
    ("context", "tokens", "waiting", "local", "reason"),
    [
        (1_000, 1_500, 1, True, Reason.BELOW_LENGTH),
        (1_000, 1_992, 1, True, Reason.BELOW_LENGTH),  # in blocks of 16, 992 are held
        (1_000, 1_993, 1, False, Reason.ABOVE_LENGTH),
        (0, 1_001, 1, False, Reason.ABOVE_LENGTH),
        (1_000, 9_000, 2, False, Reason.ABOVE_LENGTH),
        (1_000, 9_000, 3, True, Reason.PREFILL_QUEUE_LONG),
    ],
)
def test_conditional(context: int, tokens: int, waiting: int, local: bool, reason: Reason) -> None:
    scene = pair(policy="conditional")
    found = scene.place(case(tokens, session("d0", context), waiting=waiting))
    assert found is not None
    assert (found.mode, found.reason) == (Mode.LOCAL if local else Mode.REMOTE, reason)
    assert found.decode is scene.worker("d0")


def test_a_prefix_on_the_decode_worker_counts_as_computed() -> None:
    scene = pair(policy="conditional")
    scene.holds("d0", 0, range(3_200))
    found = scene.place(case(4_000, session("d0", 100)))
    assert found is not None
    assert (found.reason, found.decode_cached_tokens) == (Reason.BELOW_LENGTH, 3_200)


@pytest.mark.parametrize("known", [None, session("d9")], ids=["first turn", "worker gone"])
@pytest.mark.parametrize(
    ("tokens", "waiting", "at", "reason"),
    [
        (1_000, 1, "d0", Reason.BELOW_LENGTH),
        (1_001, 1, None, Reason.ABOVE_LENGTH),
        (3_000, 1, "d1", Reason.BELOW_LENGTH),  # the shared prefix is there
        (3_001, 2, None, Reason.ABOVE_LENGTH),
        (3_001, 3, "d1", Reason.PREFILL_QUEUE_LONG),
    ],
)
def test_conditional_is_asked_where_no_worker_holds_the_history(
    known: Session | None, tokens: int, waiting: int, at: str | None, reason: Reason
) -> None:
    scene = pair(decodes=2, policy="conditional")
    if tokens > 2_000:
        scene.holds("d1", 0, range(2_000))
    found = scene.place(case(tokens, known, waiting=waiting))
    assert found is not None
    assert (found.reason, found.policy) == (reason, "conditional")
    assert found.mode is (Mode.REMOTE if at is None else Mode.LOCAL)
    assert at is None or found.decode is scene.worker(at)


def test_conditional_is_not_asked_where_no_decode_worker_takes_the_request() -> None:
    scene = pair(policy="conditional")
    scene.beat(d0=0)
    found = scene.place(case())
    assert found is not None
    assert (found.mode, found.reason, found.decode) == (Mode.REMOTE, Reason.FIRST_TURN, None)
