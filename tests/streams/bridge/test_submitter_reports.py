"""What is told of a prompt that is asked: its call, its request, its answer and its parts."""

import asyncio
import gc

import pytest

from schemas.errors import BrokerUnavailable, WorkerLost
from schemas.fleet import Member
from schemas.records import Endpoint, Role
from streams.calls.stream.event_id import StreamKey
from streams.log.clock import wall_ms
from tests.streams import builders
from tests.streams.bridge.samples import AskingBridge, answer_of, pair, record
from tests.streams.gateway.samples import MODEL, frame, stream_end
from tests.virtual_time import virtual
from tests.waits import pass_time, until


@virtual
async def test_call_key_follows_prompt_over_tries() -> None:
    bridge = AskingBridge(cluster="c.")
    offset = bridge.log.reply_position()[1]
    for value, endpoint, session in (
        ({"text": "hi", "session_id": "s9", "deadline_ms": 5_000}, Endpoint.CHAT, "s9"),
        ({"body": {"prompt": "hi"}, "deadline_ms": 5_000}, Endpoint.COMPLETION, ""),
    ):
        prompt_record = record(value)
        prompt = await bridge.pending_prompt(prompt_record)
        for tries in (1, 2):
            key = bridge.asking.begin(prompt).key
            assert key.pack() and key == StreamKey(
                parent_id=bridge.asking._ids(prompt_record, tries)[0],
                session_id=session or bridge.asking._ids(prompt_record, 1)[1],
                model=MODEL,
                endpoint=endpoint,
                partition=bridge.log.partition,
                offset=offset,
                created_s=prompt.asked_ms // 1_000,
                deadline_ms=prompt.asked_ms + 5_000,
                choices=1,
            )
            bridge.asking.release(prompt)
        assert prompt.starts == {bridge.log.partition: offset}


@virtual
async def test_request_takes_turn_from_messages_without_targets() -> None:
    bridge = AskingBridge()
    bridge.answer_in_turn(bridge.answer("a"))
    roles = ("system", "user", "assistant", "user", "assistant", "user")
    messages = [{"role": role, "content": "hi"} for role in roles]
    await bridge.settle(record({"messages": messages, "session_id": "s9"}))
    (request,) = bridge.log.requests
    assert (request.session_id, request.turn) == ("s9", 2)
    assert (request.w_ttft, request.w_tpot) == (-1.0, -1.0), "as the deployment says"
    assert request.policy == request.orchestration == ""


@virtual
async def test_answer_records_time_of_first_token() -> None:
    bridge = AskingBridge(pair(format="avro"))
    settling, request_id = await bridge.begin()
    await pass_time(2.0)
    await bridge.log.push(frame(request_id, ["a"]))
    first_ms = wall_ms()
    await pass_time(8.0)
    end = stream_end(request_id, ["a", "b"])
    await bridge.log.push(frame(request_id, ["b"], first_seq=1, first_char=1, end=end))
    answer = answer_of(await settling)
    assert abs(answer.first_token_ms - first_ms) <= 1, "a ms is rounded"
    assert answer.ended_ms == wall_ms()
    bridge.answer_in_turn(bridge.answer())
    assert answer_of(await bridge.settle()).first_token_ms == 0, "without a token"


@virtual
async def test_parts_restart_with_new_attempt() -> None:
    bridge = AskingBridge()
    parts = bridge.log.producer.parts

    async def say() -> None:
        await bridge.log.wait_sent(1)
        request_id = bridge.log.requests[0].request_id
        for count, pieces in enumerate((["He"], ["l", "lo"])):
            first = sum(part.tokens for part in parts)
            chars = sum(len(part.text) for part in parts)
            await bridge.log.push(frame(request_id, pieces, first_seq=first, first_char=chars))
            await until(lambda count=count: len(parts) == count + 1)
        texts = ["Good", "bye"]
        await bridge.log.push(
            frame(request_id, texts, attempt=2, end=stream_end(request_id, texts, attempt=2))
        )

    saying = asyncio.ensure_future(say())
    answer = answer_of(await bridge.settle())
    await saying
    assert answer.text == "Goodbye"
    assert [(part.seq, part.start, part.text) for part in parts] == [
        (0, 0, "He"), (1, 2, "llo"), (0, 0, "Goodbye"),
    ]  # fmt: skip
    assert [part.finish_reason for part in parts] == ["", "", "stop"]


@pytest.mark.parametrize(("reason", "told_reason"), [("length", "length"), ("", "stop")])
@virtual
async def test_last_part_carries_finish_reason(reason: str, told_reason: str) -> None:
    bridge = AskingBridge()
    parts = bridge.log.producer.parts
    settling, request_id = await bridge.begin()
    for _ in range(2):  # the same again says nothing new
        await bridge.log.push(frame(request_id, ["H", "e"]))
        await pass_time(1.0)
    end = stream_end(request_id, ["H", "e"], finish_reason=reason)
    await bridge.log.push(frame(request_id, [], end=end))
    assert answer_of(await settling).text == "He"
    assert [(part.seq, part.tokens, part.start, part.text) for part in parts] == [
        (0, 2, 0, "He"), (2, 0, 2, ""),
    ]  # fmt: skip
    assert [part.finish_reason for part in parts] == ["", told_reason]


@virtual
async def test_parts_end_with_error_after_failure() -> None:
    """Parts that the log does not take change nothing."""
    bridge = AskingBridge(pair(format="avro", parts="rows.parts", tries_max=1))
    bridge.log.producer.trouble = BrokerUnavailable("no acknowledgement")
    settling, request_id = await bridge.begin()
    await bridge.log.push(frame(request_id, ["He", "llo"]))
    await until(lambda: len(bridge.log.producer.parts) == 1)
    bridge.fail(WorkerLost("w"))(bridge.log.requests[0])
    assert answer_of(await settling).error_code == "worker_lost"
    first, last = bridge.log.producer.parts
    assert (first.tokens, first.text, first.finish_reason) == (2, "Hello", "")
    assert (last.seq, last.tokens, last.start, last.text) == (2, 0, 5, "")
    assert (last.finish_reason, last.request_id) == ("error", request_id)
    gc.collect()


@virtual
async def test_tokens_during_slow_send_join_next_part() -> None:
    bridge = AskingBridge()
    producer = bridge.log.producer
    producer.has_room.clear()
    settling, request_id = await bridge.begin()
    await bridge.log.push(frame(request_id, ["He"]))
    await until(lambda: bool(producer.parts))
    await bridge.log.push(frame(request_id, ["l", "lo"], first_seq=1, first_char=2))
    end = stream_end(request_id, ["He", "l", "lo", "!"])
    await bridge.log.push(frame(request_id, ["!"], first_seq=3, first_char=5, end=end))
    producer.has_room.set()
    assert answer_of(await settling).text == "Hello!"
    assert [(part.seq, part.start, part.text) for part in producer.parts] == [
        (0, 0, "He"), (1, 2, "llo!"),
    ]  # fmt: skip


@virtual
async def test_submitter_rejects_unsupported_placement_without_request() -> None:
    bridge = AskingBridge()
    worker = builders.registration("w", Role.REPLICA, capability=builders.capability("w"))
    bridge.log.members.append(Member(worker, 0))
    body = {"prompt": "hi", "trivium": {"policy": "static"}}
    answer = answer_of(await bridge.settle(record({"body": body})))
    assert answer.error_code == "invalid_request"
    message = answer.error_message or ""
    assert "trivium.policy: this deployment can meet round_robin, replica" in message
    assert not bridge.log.requests
