"""Numbers in workers' reports: what cannot be meant is refused."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.errors import RecordError
from schemas.records import Phase, PhaseKind
from schemas.rules.numbers import NUMBER_MAX, TOKENS_MAX, check_numbers, float_of

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
def test_check_numbers_rejects_impossible_report(wrong: dict[str, Any]) -> None:
    check_numbers(PHASE)
    check_numbers(object())
    with pytest.raises(RecordError, match=next(iter(wrong))):
        check_numbers(replace(PHASE, **wrong))


@pytest.mark.parametrize(
    "text",
    (
        "1e400 1e1000000 -1e1000000 1e99999999999999999999 1e-400 1e-99999999999999999999 "
        "9007199254740993.0 0.12345678901234567 1.00000000000000000000000000000001"
    ).split(),
)
def test_float_of_rejects_unrepresentable_number(text: str) -> None:
    with pytest.raises(ValueError, match="has more digits than a float; store it as text"):
        float_of(text)


@pytest.mark.parametrize(
    "text",
    (
        "0.1 -0.0 0e5 1.10000000000000000000000000000000 0.30000000000000004 5e-324 1e23 "
        "9007199254740992.0 1.7976931348623157e308 "
        "0.1000000000000000055511151231257827021181583404541015625"
    ).split(),
)
def test_float_of_reads_representable_number(text: str) -> None:
    assert float_of(text) == float(text)
