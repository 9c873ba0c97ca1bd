"""One stack of simulated engines with real NIXL: what a client sees when nothing dies."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import pytest

from infra.bench.faults.log_audit import audit, read_raw, read_topic
from infra.bench.log_counts import record_bytes
from infra.stack.launcher import Stack
from infra.story.record_finder import read_story
from infra.story.steps import steps_of
from infra.traces.formats import read, write
from infra.traces.from_log import read_log
from infra.traces.report import report
from infra.traces.sender import Pace, send
from infra.traces.trace import Arrival, Trace
from schemas.settings import LogSettings
from schemas.topics import TOPICS, partition_of
from streams.log.clock import wall_ms
from tests.conftest import _fresh_topics
from tests.e2e.harness import Answer, Client, sim_settings, stack
from tests.streams.gateway.samples import events_of
from tests.waits import PATIENCE_S, until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1_800)]

COSTS = {  # records and bytes of a request that one worker prefills and another decodes
    "requests": (1, 483), "prefill": (1, 543), "decode": (1, 544), "phases": (2, 496),
    "outcomes": (1, 278), "decisions": (1, 334), "sessions": (1, 190), "usage": (1, 255),
}  # fmt: skip
WITH_TOKENS, SHORT = ("requests", "prefill", "decode"), 33  # tokens of a short prompt
LONG = 12_000  # tokens, at 2 ms each: goes on whatever the machine stalls for meanwhile
IN_FLIGHT = 24


@pytest.fixture(scope="module")
async def remote(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """1 prefill, 2 decode, 2 routers, 2 gateways; every turn is remote, so that KV moves."""
    log = await _fresh_topics(bootstrap)
    settings = sim_settings(
        log,
        gateway={"in_flight_max": IN_FLIGHT, "body_bytes_max": 100_000},
        router={"policy": "static", "local_share": 0.0, "local_after_ms": 600_000},
    )
    settings = replace(settings, model=replace(settings.model, max_model_len=LONG + 1_000))
    folder = tmp_path_factory.mktemp("remote")
    async with stack(settings, folder, prefill=1, decode=2, routers=2, gateways=2) as running:
        yield running


@pytest.fixture
async def client(remote: Stack) -> AsyncIterator[Client]:
    async with Client(remote.gateway_urls[0], remote.settings.model.served_name) as gateway_client:
        yield gateway_client


@pytest.fixture
async def other_client(remote: Stack) -> AsyncIterator[Client]:
    """The same deployment through its second gateway."""
    async with Client(remote.gateway_urls[1], remote.settings.model.served_name) as gateway_client:
        yield gateway_client


@pytest.fixture
def log(remote: Stack) -> LogSettings:
    return remote.settings.log


async def test_stream_equals_whole_answer(client: Client, other_client: Client) -> None:
    streamed = await client.stream("Tell me about logs.")
    whole = await other_client.chat("Tell me about logs.")
    assert streamed.status == whole.status == 200
    assert streamed.token_ids == whole.token_ids
    assert streamed.text == whole.text != ""
    assert streamed.finish_reason == whole.finish_reason == "length"
    assert streamed.usage["completion_tokens"] == len(streamed.token_ids) == 32
    assert streamed.is_done
    assert streamed.trivium["mode"] == "remote"
    assert whole.headers["x-trivium-prefill-worker"] == "prefill-0"
    assert whole.headers["x-trivium-decode-worker"] in ("decode-0", "decode-1")


async def test_allowed_tokens_and_echo_cross_the_log(client: Client, remote: Stack) -> None:
    """The worker restricts the answer; the gateway repeats the prompt."""
    tokens = (await client.http.post("/tokenize", json={"prompt": " yes no"})).json()["tokens"]
    body = {"model": client.model, "prompt": "Is it?", "max_tokens": 9, "return_token_ids": True}
    fields = {"allowed_token_ids": tokens, "echo": True}
    answer = (await client.http.post("/v1/completions", json=body | fields)).json()
    (choice,) = answer["choices"]
    assert choice["text"].startswith("Is it?") and choice["finish_reason"] == "length"
    assert set(choice["token_ids"]) <= set(tokens) and len(choice["token_ids"]) == 9
    streamed = await client.http.post("/v1/completions", json=body | fields | {"stream": True})
    texts = [event["choices"][0]["text"] for event in events_of(streamed.text)[:-1]]
    assert texts[0] == "Is it?" and len("".join(texts)) > len("Is it?")


async def test_kv_transfer_moves_only_missing_blocks_in_second_turn(
    client: Client, log: LogSettings
) -> None:
    client.http.headers["X-Session-Id"] = "kv-session"
    opening = "Once more, from the beginning: " + "logs and streams " * 20
    first = await client.stream(opening)
    messages = [
        {"role": "user", "content": opening},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And then?"},
    ]
    second = await client.stream("", messages=messages)
    assert second.trivium["decode_worker"] == first.trivium["decode_worker"]
    assert 0 < second.trivium["kv_bytes"] < first.trivium["kv_bytes"]
    log_audit = await audit(log)
    assert log_audit.kv_bytes() >= first.trivium["kv_bytes"] + second.trivium["kv_bytes"]


async def test_request_id_header_identifies_story(client: Client, log: LogSettings) -> None:
    answer = await client.stream("Explain this one.")
    await audit(log)
    story = await read_story(log, answer.headers["x-trivium-request-id"][:18])
    assert story.token_ids == answer.token_ids
    assert story.kv_bytes == answer.trivium["kv_bytes"] > 0
    assert story.outcome is not None
    assert story.decisions[0].candidates
    steps = [step.what for step in steps_of(story)]

    def in_order(*words: str) -> bool:
        positions = [
            next(i for i, what in enumerate(steps) if what.startswith(word)) for word in words
        ]
        return positions == sorted(positions)

    assert in_order("accepted", "place remote", "first token", "32 tokens", "completed")
    # Decode of a pair may have the KV before prefill has sent the token that both of them say.
    assert in_order("place remote", "kv received", "32 tokens")


async def test_gateways_serve_many_streams_concurrently(
    client: Client, other_client: Client
) -> None:
    answers = await asyncio.gather(
        *(
            (client if number % 2 else other_client).stream(f"Question {number}")
            for number in range(40)
        )
    )
    assert all(answer.is_done and len(answer.token_ids) == 32 for answer in answers)
    assert len({answer.text for answer in answers}) == 40


async def test_accepted_requests_have_one_outcome_and_reason(
    client: Client, log: LogSettings
) -> None:
    sessions = {partition_of(f"s-{n}", log.session_partitions): f"s-{n}" for n in range(16)}
    assert len(sessions) == 2
    for session in sessions.values():
        client.http.headers["X-Session-Id"] = session
        assert (await client.stream("One more.")).is_done
    log_audit = await audit(log)
    placed = log_audit.of_kind("place")
    assert {d.router_id for d in placed} == {"router-0", "router-1"}
    assert all(d.candidates for d in placed)


@pytest.mark.parametrize("way", ["disconnect", "delete"])
async def test_worker_stops_cancelled_request(client: Client, log: LogSettings, way: str) -> None:
    partial_answer = Answer()
    task = asyncio.create_task(client.stream(f"Long {way}", into=partial_answer, max_tokens=LONG))
    await until(lambda: len(partial_answer.token_ids) > 3)
    request_id = partial_answer.headers["x-request-id"]
    if way == "delete":
        response = await client.http.delete(f"/v1/requests/{request_id}")
        assert response.status_code in (200, 202)
        await task
        assert partial_answer.error["code"] == "cancelled"
    else:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    log_audit = await audit(log)
    (outcome,) = log_audit.outcomes[request_id]
    assert outcome.kind == "cancelled"
    assert 0 < outcome.completion_tokens < LONG


async def test_other_gateway_resumes_stream_after_event(
    client: Client, other_client: Client
) -> None:
    whole = await client.stream("Resume me", max_tokens=300)
    request_id = whole.headers["x-request-id"]
    for place in (0, len(whole.event_ids) // 2, -1):
        rest = await other_client.resume(request_id, whole.event_ids[place])
        tokens, chars = whole.marks[place]
        assert rest.is_done
        assert rest.token_ids == whole.token_ids[tokens:]
        assert rest.text == whole.text[chars:]


async def test_other_gateway_resumes_running_stream_to_end(
    client: Client, other_client: Client
) -> None:
    client.http.headers["X-Trivium-On-Disconnect"] = "continue"
    partial_answer = Answer()
    task = asyncio.create_task(client.stream("Resume me live", into=partial_answer, max_tokens=600))
    await until(lambda: bool(partial_answer.event_ids))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    rest = await other_client.resume(
        partial_answer.headers["x-request-id"], partial_answer.event_ids[-1]
    )
    assert rest.is_done
    assert len(partial_answer.token_ids) + len(rest.token_ids) == 600


async def test_anthropic_client_reads_what_other_gateway_resumes(
    remote: Stack, client: Client, other_client: Client
) -> None:
    """A message is the same whole, streamed, and put together from the events of two gateways."""
    turns: Any = [{"role": "user", "content": "Tell me of piers."}]
    fields: Any = {"model": client.model, "max_tokens": 400, "messages": turns}
    greedy = {"temperature": 0}  # its own field no more
    async with anthropic.AsyncAnthropic(
        base_url=remote.gateway_urls[0], api_key="none", timeout=PATIENCE_S
    ) as stock:
        whole = await stock.messages.create(**fields, extra_body=greedy)
        async with stock.messages.stream(**fields, extra_body=greedy) as stream:
            final = await stream.get_final_message()
    text = whole.model_dump()["content"][0]["text"]
    assert [block["text"] for block in final.model_dump()["content"]] == [text] != [""]
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens <= 400
    headers = {"x-trivium-on-disconnect": "continue"}
    lines, path = list[str](), "/v1/messages"
    call = client.http.stream(
        "POST", path, json=fields | greedy | {"stream": True}, headers=headers
    )
    async with call as response:
        async for line in response.aiter_lines():
            lines.append(line)
            if not line and len(lines) > 100:
                break
    last_id = [line for line in lines if line.startswith("id: ")][-1][4:]
    rest = await other_client.http.post(path, json={}, headers={"Last-Event-ID": last_id})
    events = events_of("\n".join(lines) + "\n" + rest.text)
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(deltas) == text
    assert [event["type"] for event in events].count("message_start") == 1
    assert events[-1]["type"] == "message_stop"


async def test_gateway_reports_limits_by_status(client: Client, log: LogSettings) -> None:
    too_long = await client.chat("x " * 20_000)
    assert (too_long.status, too_long.error["code"]) == (400, "context_length_exceeded")
    too_large = await client.chat("x" * 200_000)
    assert (too_large.status, too_large.error["code"]) == (413, "body_too_large")
    # Whole answers: with so many fast streams this client would be too slow to send its next head.
    holding = [
        asyncio.create_task(client.chat(f"hold {number}", max_tokens=LONG))
        for number in range(IN_FLIGHT)
    ]

    async def is_full() -> bool:
        metrics = (await client.http.get("/metrics")).text
        return f"\ntrivium_gateway_in_flight {IN_FLIGHT}.0\n" in metrics

    await until(is_full)
    refused = await asyncio.gather(*(client.stream(f"More {number}") for number in range(8)))
    assert {answer.status for answer in refused} == {429}
    assert {answer.error["code"] for answer in refused} == {"too_many_requests"}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    for task in holding:
        task.cancel()
    await asyncio.gather(*holding, return_exceptions=True)
    await audit(log)  # by then the gateway holds none of them


BAD_BODIES = {
    "malformed JSON": (b"{", 400, "invalid"),
    "unknown model": (b'{"model":"no","messages":[{"role":"user","content":"a"}]}', 404, "no"),
    "no messages": (b'{"model":"sim","messages":[]}', 400, "messages"),
    "bad temperature": (
        b'{"model":"sim","messages":[{"role":"user","content":"a"}],"temperature":9}',
        400,
        "temperature",
    ),
    "bad max_tokens": (
        b'{"model":"sim","messages":[{"role":"user","content":"a"}],"max_tokens":0}',
        400,
        "max_tokens",
    ),
}


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_gateway_refuses_bad_body_before_log(
    client: Client, log: LogSettings, name: str
) -> None:
    body, status, word = BAD_BODIES[name]
    before = len(await read_topic(log, "requests"))
    headers = {"content-type": "application/json"}
    response = await client.http.post("/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == status
    assert word.lower() in response.json()["error"]["message"].lower()
    assert len(await read_topic(log, "requests")) == before


POISONED = [
    "requests",
    "cancellations",
    "phases",
    "outcomes",
    "prefill",
    "decode",
    "tokens",
    "fleet",
]


@pytest.mark.parametrize("topic", POISONED)
async def test_consumer_dead_letters_undecodable_record_and_continues(
    client: Client, log: LogSettings, topic: str
) -> None:
    from schemas.codec import Codec
    from streams.log.clients import LogProducer

    producer = LogProducer(log, Codec(), durable=True, client_id="poison")
    await producer.start()
    for partition in range(log.partitions(TOPICS[topic].group)):
        name = log.topic_prefix + topic
        await (await producer.send_raw(name, b"\xc3\x01poison", key=b"k", partition=partition))
    await producer.stop()

    async def buried() -> bool:
        return bool(await read_raw(log, topic + ".dlq"))

    await until(buried)
    record = (await read_raw(log, topic + ".dlq"))[0]
    assert dict(record.headers)["x-dlq-topic"].decode() == log.topic_prefix + topic
    answer = await client.stream(f"After poison on {topic}")
    assert answer.is_done
    assert len(answer.token_ids) == 32


async def test_gateway_sends_one_request_per_choice(client: Client, log: LogSettings) -> None:
    body = client.body("Choose", n=3, temperature=1.0, seed=5)
    response = await client.http.post("/v1/chat/completions", json=body)
    payload = response.json()
    assert [choice["index"] for choice in payload["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in payload["choices"]}) == 3
    assert payload["usage"]["completion_tokens"] == 96
    records = await audit(log)
    request_id = response.headers["x-request-id"]
    assert sum(r.parent_id == request_id for r in records.requests.values()) == 3


async def test_trace_survives_round_trip_through_log(
    remote: Stack, log: LogSettings, tmp_path: Path
) -> None:
    """Lengths and shared prefixes survive, also in Dynamo's format; turns stay in order."""
    rows = [(40, 3, (0, 1, 2)), (44, 5, (0, 1, 3)), (30, 2, (4, 5))]
    arrivals = [
        Arrival(
            at_ms=20.0 * at,
            prompt_tokens=length,
            output_tokens=answer,
            blocks=blocks,
            session_id="one",
        )
        for at, (length, answer, blocks) in enumerate(rows)
    ]
    trace = Trace(format="test", arrivals=arrivals, block_tokens=16)
    begin_ms = wall_ms()
    model = remote.settings.model.served_name
    answers = await send(trace, remote.gateway_urls[0], model, Pace(), api_key="none")
    assert [answer.error for answer in answers] == ["", "", ""]
    assert report(answers)["total_osl"]["avg"] == 10

    async def is_complete() -> bool:
        return len((await read_log(log, begin_ms, wall_ms(), 16)).arrivals) == 3

    await until(is_complete)
    path = tmp_path / "trace.jsonl"
    write(await read_log(log, begin_ms, wall_ms(), 16), path, "dynamo", model)
    read_arrivals = read(path).arrivals
    assert [(e.prompt_tokens, e.output_tokens, (*e.blocks,)) for e in read_arrivals] == rows


@pytest.mark.parametrize(("words", "count"), [(1, 6), (9_000, 2)])
async def test_request_writes_expected_records_and_bytes(
    client: Client, log: LogSettings, words: int, count: int
) -> None:
    """A record more per request is a decision: it costs gateways, routers and the broker. A token
    of the prompt takes four bytes in the request and in each work, and none elsewhere.

    Where a router takes partitions over meanwhile, as on a slow machine, it sends work again. Then
    as many requests are counted once more.
    """
    for _ in range(3):
        prompt_tokens, sizes = await _cost_of_requests(client, log, words, count)
        expected = {topic: records * count for topic, (records, _) in COSTS.items()}
        if (counts := {topic: len(sizes[topic]) for topic in COSTS}) == expected:
            break
    assert counts == expected
    for topic, (_, size) in COSTS.items():
        extra_bytes = 4 * (prompt_tokens - count * SHORT) if topic in WITH_TOKENS else 0
        assert sum(sizes[topic]) == pytest.approx(size * count + extra_bytes, rel=0.05), topic


async def _cost_of_requests(
    client: Client, log: LogSettings, words: int, count: int
) -> tuple[int, dict[str, list[int]]]:
    """Tokens of all prompts, and bytes of the records of these requests alone by topic: what tests
    before wrote may come late."""
    names, sizes, prompt_tokens = list[bytes](), dict[str, list[int]](), 0

    async def is_written() -> bool:
        for topic in COSTS:
            sizes[topic] = [
                record_bytes(record)
                for record in await read_raw(log, topic)
                if any(name in (record.key or b"") + (record.value or b"") for name in names)
            ]
        return all(len(sizes[topic]) >= records * count for topic, (records, _) in COSTS.items())

    for number in range(count):
        question = f"What does question {number} cost?" + " block" * (words - 1)
        answer = await client.chat(question, max_tokens=8)
        assert answer.status == 200
        prompt_tokens += answer.usage["prompt_tokens"]
        names += [answer.headers[name].encode() for name in ("x-request-id", "x-session-id")]
    await until(is_written)
    return prompt_tokens, sizes
