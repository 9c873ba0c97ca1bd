"""What callers send: what reaches the log, and what is refused before it, by table."""

import json
from array import array
from typing import Any

import pytest

from schemas.records import (
    Endpoint,
    Priority,
    Sampling,
    Structured,
    StructuredKind,
)
from schemas.rules.tokens import unpack_tokens
from streams.calls.request.form import REGEX_CHARS_MAX
from streams.calls.request.intake import BAD_WORD_CHARS_MAX, STOP_CHARS_MAX
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.samples import MODEL, chat, completion
from tests.streams.gateway.small_tokenizer import tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
HARMLESS: list[dict[str, Any]] = [
    {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
    {"store": True, "metadata": {"a": "b"}, "service_tier": "auto"},
    {"n": 1, "logit_bias": None, "response_format": {"type": "text"}, "functions": None},
    {"stream": False, "stream_options": None, "modalities": ["text"], "priority": 0},
    {"request_id": "mine", "stream_interval": 4, "logprob_token_ids": [], "vllm_xargs": {}},
    {"allowed_token_ids": []},
]
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 2.5}, "temperature: expected less than or equal to 2"),
    ({"temperature": "hot"}, "temperature: expected a valid number"),
    ({"top_p": -0.1}, "top_p: expected greater than or equal to 0"),
    ({"max_tokens": 4.5}, "max_tokens: expected a valid integer"),
    ({"max_tokens": True}, "max_tokens: expected a valid integer"),
    ({"cache_salt": ""}, "cache_salt: expected at least 1 character"),
    ({"cache_salt": "x" * 257}, "cache_salt: expected at most 256 characters"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids: not supported; the log has the likely tokens"),
    ({"truncate_prompt_tokens": 512}, "truncate_prompt_tokens: expected at most 511, found 512"),
    ({"session_id": "ä"}, "session_id: expected 1 to 128 printable ASCII characters"),
    ({"top_k": -2}, "top_k: expected greater than or equal to -1"),
    ({"min_p": 1.5}, "min_p: expected less than or equal to 1"),
    ({"n": 0}, "n: expected greater than or equal to 1"),
    ({"n": 17}, "n: expected at most 16 answers of one call, found 17"),
    ({"max_tokens": 0}, "max_tokens: expected greater than or equal to 1"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens: expected at most max_tokens=3, found 9"),
    ({"presence_penalty": 3}, "presence_penalty: expected less than or equal to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty: expected greater than 0"),
    ({"seed": 2**63}, "seed: "),
    ({"stop": [""]}, "stop: expected a string or a list of strings, none of them empty"),
    ({"stop": 5}, "stop: expected a string or a list of strings"),
    ({"stop": ["x"] * 17}, "stop: expected at most 16, found 17"),
    ({"stop_token_ids": [300]}, "stop_token_ids: expected token ids from 0 to 299, found 300"),
    ({"allowed_token_ids": [7, 300]}, "allowed_token_ids: expected token ids from 0 to 299, found"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids: expected token ids from 0 to 299, found -1"),
    ({"allowed_token_ids": [1] * 1_025}, "allowed_token_ids: expected at most 1024, found 1025"),
    ({"allowed_token_ids": [1.5]}, "allowed_token_ids.0: expected a valid integer"),
    ({"allowed_token_ids": "ab"}, "allowed_token_ids: expected a valid array"),
    ({"logit_bias": {"x": 1}}, "logit_bias: expected token ids from 0 to 299, found 'x'"),
    ({"logit_bias": {"1": 200}}, "logit_bias.1: expected a bias from -100 to 100, found 200"),
    ({"top_logprobs": 2}, "top_logprobs: needs logprobs=true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: expected less than or equal to 20"),
    ({"messages": []}, "messages: expected at least 1 of them, found []"),
    ({"messages": [{"role": "", "content": "x"}]}, "messages.0.role: expected at least 1"),
    ({"messages": [{"content": "x"}]}, "messages.0.role: required, but missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: expected a valid string"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content.0.type: expected text, found 'image_url'; only text is served",
    ),
    ({"audio": {"voice": "x"}}, "audio: not supported; only text is served"),
    ({"best_of": 3}, "best_of: not supported; it would generate answers and drop them; use `n`"),
    ({"temprature": 1}, "temprature: unknown field; check its spelling"),
    ({"priority": "urgent"}, "priority: expected one of interactive, standard, batch"),
    ({"stream_options": {"include_usage": True}}, "stream_options: needs stream=true"),
    ({"response_format": {"type": "xml"}}, "response_format.type: expected 'text'"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema: required with type json_schema, but missing",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "objekt"}},
            }
        },
        "response_format.json_schema.schema: not a valid JSON schema at type: 'objekt'",
    ),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex: not a regular expression"),
    ({"structured_outputs": {"rgx": "a"}}, "structured_outputs.rgx: unknown field"),
    ({"response_format": {"type": "structural_tag"}}, "response_format: expected type structural"),
    ({"response_format": {"type": "json_object", "format": {}}}, "response_format.format: needs"),
    ({"guided_choice": []}, "guided_choice: expected choices"),
    ({"guided_json": "{"}, "guided_json: expected a JSON schema"),
    ({"guided_grammar": " "}, "guided_grammar: expected a text, found an empty one"),
    (
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        "response_format and guided_regex: expected one form of the answer at most",
    ),
]
BAD_BODIES: list[tuple[str, bytes, int, str, str]] = [
    ("chat/completions", b"{", 400, "invalid_request", "invalid JSON: "),
    ("chat/completions", b"", 400, "invalid_request", "invalid JSON: "),
    (
        "chat/completions",
        b"[]",
        400,
        "invalid_request",
        "the body: expected a JSON object, found []",
    ),
    ("chat/completions", b"{}", 400, "invalid_request", "messages: required, but missing"),
    ("chat/completions", b"\xff\xfe", 400, "invalid_request", "invalid JSON: "),
    (
        "chat/completions",
        b'{"model":"no","messages":[{"role":"user","content":"x"}]}',
        404,
        "model_not_found",
        "model: expected 'test-model', found 'no'",
    ),
    (
        "completions",
        b'{"model":"test-model","prompt":""}',
        400,
        "invalid_request",
        "prompt: expected at least one token, found none",
    ),
    (
        "completions",
        b'{"model":"test-model","prompt":{"a":1}}',
        400,
        "invalid_request",
        "prompt: expected a string, token ids, or a list of one kind of these",
    ),
    (
        "completions",
        b'{"model":"test-model","prompt":["a",1]}',
        400,
        "invalid_request",
        "prompt: expected a string, token ids",
    ),
    (
        "completions",
        b'{"model":"test-model","prompt":[1,300]}',
        400,
        "invalid_request",
        "prompt: expected token ids from 0 to 299, found 1 to 300",
    ),
    (
        "completions",
        b'{"model":"test-model","prompt":"a","suffix":"b"}',
        400,
        "invalid_request",
        "suffix: not supported; each model has its own marks for it; put the suffix",
    ),
]


async def requests_of(body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
    """The requests that a body becomes."""
    gateway = InProcessGateway()
    gateway.answer_with("ok")
    status, answer = await call(gateway, body, path)
    assert status == 200, answer
    return gateway.log.requests


async def test_chat_becomes_request_record() -> None:
    (request,) = await requests_of(chat("hello", max_tokens=9, seed=5, user="u"))
    assert request.request_id == request.parent_id
    assert len(request.request_id) == 27
    assert request.endpoint is Endpoint.CHAT
    assert request.priority is Priority.STANDARD
    assert request.gateway_id == "gateway-1"
    assert request.gateway_partition == 3
    assert request.deadline_ms == request.arrived_ms + 120_000
    assert unpack_tokens(request.prompt_tokens) == [0, 3, 275, 1, 4]
    assert request.sampling == Sampling(max_tokens=9, seed=5)


async def test_intake_sets_seed_and_default_max_tokens() -> None:
    (request,) = await requests_of(chat("hello"))
    assert request.sampling.seed is not None
    assert request.sampling.max_tokens == 512 - 5
    (request,) = await requests_of(completion("hello"), "/v1/completions")
    assert request.sampling.max_tokens == 16


async def test_intake_writes_every_sampling_parameter() -> None:
    body = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=-3,
        stop=["a", "b"],
        stop_token_ids=[5],
        include_stop_str_in_output=True,
        ignore_eos=True,
        min_tokens=2,
        max_completion_tokens=8,
        presence_penalty=1,
        frequency_penalty=-1.5,
        repetition_penalty=1.1,
        logit_bias={"007": 5},
        bad_words=["no"],
        allowed_token_ids=[9, 4.0, 9],
        skip_special_tokens=False,
        logprobs=True,
        top_logprobs=3,
    )
    (request,) = await requests_of(body)
    assert request.sampling == Sampling(
        max_tokens=8,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=-3,
        presence_penalty=1.0,
        frequency_penalty=-1.5,
        repetition_penalty=1.1,
        stop=("a", "b"),
        stop_token_ids=(5,),
        include_stop=True,
        ignore_eos=True,
        skip_special_tokens=False,
        logprobs=3,
        logit_bias={"7": 5.0},
        bad_words=("no",),
        allowed_token_ids=(9, 4, 9),
    )


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, StructuredKind.JSON_OBJECT, ""),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            StructuredKind.JSON_SCHEMA,
            json.dumps(SCHEMA, separators=(",", ":")),
        ),
        ({"structured_outputs": {"regex": r"\d+"}}, StructuredKind.REGEX, r"\d+"),
        ({"structured_outputs": {"regex": r"\p{L}+"}}, StructuredKind.REGEX, r"\p{L}+"),
        ({"guided_choice": ["a", "b"]}, StructuredKind.CHOICE, '["a", "b"]'),
        ({"guided_grammar": "root ::= 'a'"}, StructuredKind.GRAMMAR, "root ::= 'a'"),
        ({"guided_json": json.dumps(SCHEMA)}, StructuredKind.JSON_SCHEMA, None),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            StructuredKind.STRUCTURAL_TAG,
            '{"type":"structural_tag","format":{"type":"any_text"}}',
        ),
        (
            {"structured_outputs": {"structural_tag": '{"structures": [], "triggers": []}'}},
            StructuredKind.STRUCTURAL_TAG,
            '{"structures":[],"triggers":[]}',
        ),
    ],
)
async def test_intake_writes_structured_output_constraint(
    fields: dict[str, Any], kind: StructuredKind, value: str | None
) -> None:
    (request,) = await requests_of(chat(**fields))
    expected = json.dumps(SCHEMA, separators=(",", ":")) if value is None else value
    assert request.sampling.structured == Structured(kind=kind, value=expected)


@pytest.mark.parametrize("fields", HARMLESS)
async def test_intake_accepts_neutral_fields(fields: Any) -> None:
    assert len(await requests_of(chat(**fields))) == 1


async def test_intake_accepts_text_parts_and_returned_assistant_messages() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": parts},
        {
            "role": "assistant",
            "content": "y",
            "refusal": None,
            "tool_calls": [],
            "annotations": [],
            "audio": None,
        },
        {"role": "user", "content": "z", "name": "Zoe"},
    ]
    (request,) = await requests_of({"model": MODEL, "messages": messages})
    gateway = InProcessGateway()
    _, expected = await call(
        gateway,
        {
            "prompt": "<s><|system|>x</s><|user|>a\nb</s>"
            "<|assistant|>y</s><|user|>z</s><|assistant|>"
        },
        "/tokenize",
    )
    assert unpack_tokens(request.prompt_tokens) == expected["tokens"]
    assert request.turn == 1


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({"top_p": 0}, {"temperature": 0.0}),
        ({"top_p": 0.0, "temperature": 1.5}, {"temperature": 0.0}),
        ({"max_tokens": 4.0, "top_k": 3.0, "seed": 7.0}, {"max_tokens": 4, "top_k": 3, "seed": 7}),
        ({"stop_token_ids": [5.0]}, {"stop_token_ids": (5,)}),
    ],
)
async def test_intake_normalizes_sampling_fields_of_other_servers(
    fields: Any, sampling: dict[str, Any]
) -> None:
    """`top_p: 0` means greedy sampling, and a whole number may be a double."""
    (request,) = await requests_of(chat(**{"seed": 1, "max_tokens": 9, **fields}))
    expected = {"seed": 1, "max_tokens": 9, **sampling}
    assert request.sampling == Sampling(**expected)


async def test_intake_accepts_whole_doubles_as_prompt_tokens() -> None:
    (request,) = await requests_of(completion([5.0, 6.0]), "/v1/completions")
    assert unpack_tokens(request.prompt_tokens) == [5, 6]


async def test_intake_skips_byte_order_mark() -> None:
    """Tools on Windows write one."""
    gateway = InProcessGateway()
    gateway.answer_with("ok")
    body = b"\xef\xbb\xbf" + json.dumps(chat()).encode()
    assert (await call(gateway, body))[0] == 200


async def test_intake_defaults_to_served_model() -> None:
    gateway = InProcessGateway()
    gateway.answer_with("ok")
    for path, body in (("chat/completions", chat()), ("completions", completion())):
        del body["model"]
        status, answer = await call(gateway, body, "/v1/" + path)
        assert (status, answer["model"]) == (200, MODEL)


async def test_intake_reads_session_id_from_body() -> None:
    """The field is vLLM's `session_id`; the header takes precedence."""
    gateway = InProcessGateway()
    gateway.answer_with("ok")
    await call(gateway, chat(session_id="one"))
    await call(gateway, chat(session_id="one"), x_session_id="two")
    assert [request.session_id for request in gateway.log.requests] == ["one", "two"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate_prompt_tokens": 3}, [7, 8, 9]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [5, 6, 7]),
        ({"truncate_prompt_tokens": -1}, [5, 6, 7, 8, 9]),
        ({"truncation_side": "right"}, [5, 6, 7, 8, 9]),
    ],
)
async def test_intake_truncates_prompt_on_request(fields: Any, expected: list[int]) -> None:
    (request,) = await requests_of(completion([5, 6, 7, 8, 9], **fields), "/v1/completions")
    assert unpack_tokens(request.prompt_tokens) == expected


@pytest.mark.parametrize(("fields", "message"), BAD_CHATS, ids=lambda value: str(value)[:40])
async def test_intake_names_invalid_field(fields: dict[str, Any], message: str) -> None:
    gateway = InProcessGateway()
    status, answer = await call(gateway, {**chat(), **fields})
    error = answer["error"]
    assert status == 400, answer
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "invalid_request"
    assert error["param"].split(".")[0] in message
    assert not gateway.log.sent_records


@pytest.mark.parametrize(("path", "body", "status", "code", "message"), BAD_BODIES)
async def test_intake_rejects_invalid_bodies(
    path: str, body: bytes, status: int, code: str, message: str
) -> None:
    gateway = InProcessGateway()
    answered, answer = await call(gateway, body, "/v1/" + path)
    assert answered == status
    assert answer["error"]["code"] == code
    assert message in answer["error"]["message"]
    assert not gateway.log.sent_records


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"x_deadline_ms": "soon"}, "x-deadline-ms"),
        ({"x_deadline_ms": "0"}, "x-deadline-ms"),
        ({"x_deadline_ms": "99999999999"}, "x-deadline-ms"),
        ({"x_priority": "urgent"}, "x-priority"),
        ({"x_session_id": "x" * 200}, "x-session-id"),
        ({"x_trivium_on_disconnect": "wait"}, "x-trivium-on-disconnect"),
        ({"last_event_id": "nonsense"}, "Last-Event-ID"),
    ],
)
async def test_intake_names_invalid_header(headers: dict[str, str], param: str) -> None:
    gateway = InProcessGateway()
    status, answer = await call(gateway, chat(), **headers)
    assert (status, answer["error"]["param"]) == (400, param)
    assert not gateway.log.sent_records


async def test_intake_rejects_prompt_over_limit() -> None:
    gateway = InProcessGateway(max_model_len=20, prompt_tokens_max=10)
    status, answer = await call(gateway, completion([5] * 11), "/v1/completions")
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    limits = "and at most 10 of a prompt are served. However, your prompt has 11 tokens; shorten it"
    assert limits in answer["error"]["message"]


@pytest.mark.parametrize("max_tokens", [11, 12, 32_000, None])
async def test_answer_fills_context_if_more_is_asked_for(max_tokens: int | None) -> None:
    """Agents ask for as many tokens as the largest models have."""
    gateway = InProcessGateway(max_model_len=20)
    gateway.answer_with("ok")
    status, _ = await call(gateway, completion([5] * 9, max_tokens=max_tokens), "/v1/completions")
    assert (status, gateway.log.requests[-1].sampling.max_tokens) == (200, 11)


async def test_intake_rejects_oversized_prompt_before_tokenizing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The length of the text alone shows that it cannot fit."""
    gateway = InProcessGateway(max_model_len=64)
    encoded: list[str] = []

    async def encode(text: str, **options: Any) -> "array[int]":
        encoded.append(text)
        return array("i", [1])

    monkeypatch.setattr(gateway.state.models.default.tokenizer, "encode", encode)
    chars_max = 63 * tokenizer().token_chars_max
    for body, path in (
        (chat("x" * (chars_max + 1)), "/v1/chat/completions"),
        (completion("x" * (chars_max + 1)), "/v1/completions"),
        ({"prompt": "x" * (chars_max + 1)}, "/tokenize"),
    ):
        status, answer = await call(gateway, body, path)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "shorten it" in answer["error"]["message"]
    assert encoded == []
    assert (await call(gateway, {"prompt": "x" * chars_max}, "/tokenize"))[0] == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": '{"a":' * 100_000},
        {"guided_json": {"$schema": []}},
        {"guided_json": '{"const": "\\ud800"}'},
        {"guided_json": '{"const": 1e999}'},
        {"guided_regex": "a" * (REGEX_CHARS_MAX + 1)},
        {"stop": ["a", "x" * (STOP_CHARS_MAX + 1)]},
        {"bad_words": ["x" * (BAD_WORD_CHARS_MAX + 1)]},
        {"chat_template_kwargs": {"bos_token": "x"}},
        {"chat_template_kwargs": {"raise_exception": 1}},
    ],
    ids=lambda value: str(value)[:40],
)
async def test_intake_returns_400_for_hostile_fields(fields: dict[str, Any]) -> None:
    status, answer = await call(InProcessGateway(), chat(**fields))
    assert (status, answer["error"]["code"]) == (400, "invalid_request"), answer


@pytest.mark.parametrize("field", ["n", "seed", "max_tokens", "priority", "model", "prompt"])
async def test_intake_returns_400_for_huge_numbers(field: str) -> None:
    """Python refuses to print such numbers, which must not become a 500."""
    gateway = InProcessGateway()
    for value in ("9" * 4_301, "-" + "9" * 5_000, f"[{'9' * 4_301}]"):
        for body, path in ((completion(), "/v1/completions"), (chat(), "/v1/chat/completions")):
            raw = json.dumps({**body, field: 0}).replace(f'"{field}": 0', f'"{field}": {value}')
            status, _ = await call(gateway, raw.encode(), path)
            assert status == 400
