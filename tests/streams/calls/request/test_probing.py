"""What a chat wishes to have found while it is answered: what workers get, and what is refused."""

from array import array
from typing import Any

import pytest

from schemas.errors import InvalidRequest
from schemas.records import Probing
from schemas.rules.tokens import unpack_tokens
from streams.calls.request.probing import repeat_question
from streams.calls.request.tokenizer import MarkedPrompt
from tests.streams.calls.request.test_search import BOOKS, retrieval_of, send_chat, texts
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.samples import chat


def probed(probes: Any, **fields: Any) -> dict[str, Any]:
    return chat("x", retrieval={**BOOKS, "probes": probes}, **fields)


async def probing_of(body: Any, model_len: int = 2_000) -> Probing:
    request = await send_chat(InProcessGateway(max_model_len=model_len), body)
    probing = retrieval_of(request).probing
    assert probing is not None
    return probing


async def test_probes_are_off_by_default() -> None:
    for body in (chat("x", retrieval=BOOKS), probed(False), probed(None)):
        assert retrieval_of(await send_chat(InProcessGateway(), body)).probing is None


async def test_probes_true_selects_defaults() -> None:
    probing = await probing_of(probed(True), model_len=8_000)
    assert (probing.trigger, probing.every, probing.lookahead, probing.probes_max) == (
        "every",
        32,
        8,
        8,
    )
    assert (probing.k, probing.tokens_max, probing.min_score) == (1, 256, 0.2)
    assert (probing.stall_ms, probing.is_warm) == (200, True)


async def test_probes_number_sets_token_interval() -> None:
    probing = await probing_of(probed(4))
    assert (probing.every, probing.lookahead) == (4, 4)


async def test_probes_object_sets_every_option() -> None:
    trigger_fields = {"trigger": "sentence", "every": 16, "lookahead": 0, "max": 3, "k": 2}
    limit_fields = {"min_score": 0.5, "tokens_max": 90, "stall_ms": 0, "warm": False}
    probing = await probing_of(probed({**trigger_fields, **limit_fields}))
    assert (probing.trigger, probing.every, probing.lookahead, probing.probes_max) == (
        "sentence",
        16,
        0,
        3,
    )
    assert (probing.k, probing.min_score, probing.tokens_max) == (2, 0.5, 90)
    assert (probing.stall_ms, probing.is_warm) == (0, False)


async def test_probes_inherit_min_score_of_search() -> None:
    body = chat("x", retrieval={**BOOKS, "min_score": 0.7, "probes": True})
    assert (await probing_of(body)).min_score == 0.7


async def test_probe_passages_stand_in_turn_that_repeats_question() -> None:
    request = await send_chat(InProcessGateway(max_model_len=2_000), probed(True))
    probing, question = retrieval_of(request).probing, chat("x")["messages"]
    assert probing is not None
    gateway = InProcessGateway(max_model_len=2_000)
    longer = chat("x", messages=[*question, {"role": "assistant", "content": ""}, *question])
    (whole,) = texts((await send_chat(gateway, longer)).prompt_tokens)
    (prompt,), (lead, joint, trail) = (
        texts(request.prompt_tokens),
        texts(probing.lead, probing.joint, probing.trail),
    )
    before, after = lead.removesuffix("Context:\n"), trail.removeprefix("\n\nQuestion: ")
    assert joint == "\n"
    assert prompt + before + after.replace("\nAnswer in one short sentence.", "", 1) == whole


def test_probing_rejects_template_that_rewrites_prompt_start() -> None:
    prompt, longer = array("i", [1, 2, 3]), array("i", [1, 9, 3, 4, 2, 5])
    nothing = array("i")
    with pytest.raises(InvalidRequest, match="leave probes out"):
        repeat_question(
            MarkedPrompt(prompt, 1, 2),
            MarkedPrompt(longer, 4, 5),
            (nothing,) * 4,
        )


async def test_probing_lowers_probe_count_in_short_context() -> None:
    probing = await probing_of(probed(True, max_tokens=1_000))
    around = sum(map(len, map(unpack_tokens, (probing.lead, probing.trail))))
    assert 1 <= probing.probes_max < 8
    assert probing.tokens_max + probing.probes_max * around < 1_000


async def test_default_max_tokens_leaves_room_for_probes() -> None:
    async def lengths(probes: Any) -> tuple[int, int]:
        request = await send_chat(InProcessGateway(max_model_len=2_000), probed(probes))
        return request.sampling.max_tokens, retrieval_of(request).room_tokens

    (plain, room), (with_probes, same_room) = await lengths(None), await lengths({"max": 2})
    probing = await probing_of(probed({"max": 2}))
    around = 2 * sum(map(len, map(unpack_tokens, (probing.lead, probing.trail))))
    assert plain - with_probes == probing.tokens_max + around
    assert room == same_room


async def test_probes_use_room_left_by_prompt_and_answer() -> None:
    bare = await send_chat(InProcessGateway(max_model_len=2_000), probed(None))
    prompt = len(unpack_tokens(bare.prompt_tokens))
    bare_room = retrieval_of(bare).room_tokens
    around = (await probing_of(probed({"max": 1}))).lead, (await probing_of(probed(1))).trail
    room = bare_room + sum(map(len, map(unpack_tokens, around))) + 10
    body = probed({"max": 1}, max_tokens=2_000 - prompt - room)
    request = await send_chat(InProcessGateway(max_model_len=2_000), body)
    probing = retrieval_of(request).probing
    assert probing is not None and probing.tokens_max == 10
    assert retrieval_of(request).room_tokens == bare_room
    assert retrieval_of(request).tokens_max == 512


async def test_probing_is_off_when_answer_takes_whole_context() -> None:
    plain = await send_chat(InProcessGateway(), chat("x"))
    body = probed(True, max_tokens=plain.sampling.max_tokens)
    assert retrieval_of(await send_chat(InProcessGateway(), body)).probing is None


@pytest.mark.parametrize(
    ("probes", "message"),
    [
        ("often", "retrieval.probes: expected"),
        (0, "retrieval.probes.every: expected greater than or equal to 1"),
        (-1, "retrieval.probes.every: expected greater than"),
        (1.5, "retrieval.probes: expected"),
        ([], "retrieval.probes: expected"),
        ({"every": True}, "retrieval.probes.every: expected"),
        ({"trigger": "x" * 65}, "retrieval.probes.trigger: expected at most 64"),
        ({"every": 4, "lookahead": 5}, "retrieval.probes.lookahead: expected at most every=4"),
        ({"max": 65}, "retrieval.probes.max: expected less than or equal to 64"),
        ({"k": 0}, "retrieval.probes.k: expected greater than"),
        ({"min_score": 2}, "retrieval.probes.min_score: expected less than"),
        ({"tokens_max": 0}, "retrieval.probes.tokens_max: expected greater than"),
        ({"stall_ms": -1}, "retrieval.probes.stall_ms: expected greater than"),
        ({"step": 1}, "retrieval.probes.step: unknown field"),
    ],
)
async def test_probing_rejects_invalid_options(probes: Any, message: str) -> None:
    status, answer = await call(InProcessGateway(), probed(probes))
    assert status == 400
    assert message in answer["error"]["message"]


async def test_probing_rejects_structured_output() -> None:
    for form in ({"response_format": {"type": "json_object"}}, {"guided_choice": ["a", "b"]}):
        status, answer = await call(InProcessGateway(), probed(True, **form))
        assert (status, answer["error"]["param"]) == (400, "retrieval.probes")
    await probing_of(probed(True, response_format={"type": "text"}, logprobs=True))
