"""Bodies that mean harm: refused before their values are read."""

from typing import Any

import pytest
from pydantic import ValidationError

from streams.calls.request.body import ChatBody, TokenizeBody
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.samples import chat, completion


async def test_body_value_limit_counts_prompt_tokens_only_in_completions() -> None:
    """A long context must not let a chat have as many messages."""
    gateway = InProcessGateway(max_model_len=50_000)
    gateway.answer_with("ok")
    prompt = completion([7] * 40_000)
    assert (await call(gateway, prompt, "/v1/completions"))[0] == 200
    status, answer = await call(gateway, {**chat(), "messages": chat()["messages"] * 20_000})
    assert (status, answer["error"]["code"]) == (400, "invalid_request")
    assert "expected at most 32768 values" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatBody, {"messages": [1, 1, 1]}),
        (ChatBody, {"messages": [{"role": "user", "content": [1, 1, 1]}]}),
        (ChatBody, {"bad_words": [1, 1, 1]}),
        (ChatBody, {"guided_choice": [1, 1, 1]}),
        (ChatBody, {"structured_outputs": {"choice": [1, 1, 1]}}),
        (TokenizeBody, {"messages": [1, 1, 1]}),
    ],
)
def test_list_validation_stops_at_first_wrong_element(kind: Any, fields: dict[str, Any]) -> None:
    """The errors of all elements would take ten seconds."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({**chat(), **fields})
    wrong = [error["loc"] for error in caught.value.errors() if error["input"] == 1]
    assert len(wrong) == 1
