"""Numbers in workers' reports: what cannot be meant is refused."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.errors import RecordError
from schemas.records import Phase, PhaseKind
from schemas.rules.numbers import NUMBER_MAX, TOKENS_MAX, check_numbers

PHASE = Phase(
    request_id="r",
    session_id="s",
    attempt=1,
    router_id="router-a",
    worker_id="w",
    worker_epoch=1,
    kind=PhaseKind.KV_RECEIVED,
    started_ms=NUMBER_MAX,
    ended_ms=0,
    prompt_tokens=TOKENS_MAX,
    transfer_ms=0.5,
)


@pytest.mark.parametrize(
    "wrong",
    [
        {"transfer_ms": float("nan")},
        {"transfer_ms": float("inf")},
        {"transfer_ms": -0.5},
        {"ended_ms": NUMBER_MAX + 1},
        {"prompt_tokens": TOKENS_MAX + 1},
        {"attempt": -1},
    ],
)
def test_what_no_worker_can_mean_is_refused(wrong: dict[str, Any]) -> None:
    check_numbers(PHASE)
    check_numbers(object())
    with pytest.raises(RecordError, match=next(iter(wrong))):
        check_numbers(replace(PHASE, **wrong))
