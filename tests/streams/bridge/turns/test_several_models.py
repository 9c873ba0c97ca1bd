"""Prompts that name a model or an adapter; on virtual time."""

import pytest

from tests.streams.bridge.samples import AskingBridge, answer_of, pair, record
from tests.streams.gateway.endpoints.several_models import LAW, SMALL
from tests.streams.gateway.samples import MODEL
from tests.virtual_time import virtual


@virtual
@pytest.mark.parametrize(
    ("pairs_model", "prompts_model", "expected"),
    [
        ("", None, (MODEL, "")),
        ("small", None, ("small", "")),
        ("small", LAW.name, (MODEL, LAW.name)),
        (LAW.name, "small", ("small", "")),
        ("", f"{LAW.name}@docs", (MODEL, LAW.name)),
    ],
)
async def test_prompt_goes_to_its_model_or_to_that_of_its_pair(
    pairs_model: str, prompts_model: str | None, expected: tuple[str, str]
) -> None:
    of = pair(format="avro", model=pairs_model)
    bridge = AskingBridge(of, other_cards=[LAW, SMALL])
    bridge.answer_in_turn(bridge.answer("yes"))
    prompt = record({"text": "hi", **({"model": prompts_model} if prompts_model else {})})
    (sending,) = await bridge.settle(prompt)
    assert answer_of([sending]).model == (expected[1] or expected[0])
    (request,) = bridge.log.requests
    assert (request.model, request.adapter) == expected


@virtual
@pytest.mark.parametrize("name", ["other", "@", "small@docs", "x" * 9_999])
async def test_prompt_for_unknown_model_is_answered_with_error(name: str) -> None:
    bridge = AskingBridge(other_cards=[LAW, SMALL])
    answer = answer_of(await bridge.settle(record({"text": "hi", "model": name})))
    code = "invalid_request" if name == "small@docs" else "model_not_found"
    assert answer.error_code == code and len(answer.error_message or "") < 400
    assert not bridge.log.requests
