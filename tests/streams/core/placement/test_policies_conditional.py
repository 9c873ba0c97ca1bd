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
def test_conditional_policy_decides_by_length_and_queue(
    context: int, tokens: int, waiting: int, local: bool, reason: Reason
) -> None:
    scene = pair(policy="conditional")
    placement = scene.place(case(tokens, session("d0", context), waiting=waiting))
    assert placement is not None
    assert (placement.mode, placement.reason) == (Mode.LOCAL if local else Mode.REMOTE, reason)
    assert placement.decode is scene.worker("d0")


def test_conditional_policy_counts_prefix_on_decode_worker() -> None:
    scene = pair(policy="conditional")
    scene.holds("d0", 0, range(3_200))
    placement = scene.place(case(4_000, session("d0", 100)))
    assert placement is not None
    assert (placement.reason, placement.decode_cached_tokens) == (Reason.BELOW_LENGTH, 3_200)


@pytest.mark.parametrize("last_session", [None, session("d9")], ids=["first turn", "worker gone"])
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
def test_conditional_policy_decides_without_session_worker(
    last_session: Session | None, tokens: int, waiting: int, at: str | None, reason: Reason
) -> None:
    scene = pair(decodes=2, policy="conditional")
    if tokens > 2_000:
        scene.holds("d1", 0, range(2_000))
    placement = scene.place(case(tokens, last_session, waiting=waiting))
    assert placement is not None
    assert (placement.reason, placement.policy) == (reason, "conditional")
    assert placement.mode is (Mode.REMOTE if at is None else Mode.LOCAL)
    assert at is None or placement.decode is scene.worker(at)


def test_conditional_policy_is_skipped_when_decode_is_full() -> None:
    scene = pair(policy="conditional")
    scene.beat(d0=0)
    placement = scene.place(case())
    assert placement is not None
    assert (placement.mode, placement.reason, placement.decode) == (
        Mode.REMOTE,
        Reason.FIRST_TURN,
        None,
    )
