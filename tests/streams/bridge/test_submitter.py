"""One prompt at the routers, until it has an answer or an error that stands; on virtual time, by a
gateway's own way in, over a log in memory."""

import asyncio
from typing import Any

import numpy as np
import pytest
from openai.types import CreateEmbeddingResponse
from openai.types.responses import Response

from schemas.errors import (
    DeadlineExceeded,
    LeaseError,
    NotReady,
    TooManyRequests,
    WorkerLost,
)
from schemas.log.clock import wall_ms
from schemas.log.transactions import OutgoingRecord
from schemas.records import Answer, Request
from streams.bridge.answers import AnswerBuilder
from streams.bridge.limits import TopicLimits
from streams.bridge.pending_prompt import PairIO
from streams.bridge.records.record import PromptRecord
from streams.bridge.submitter import VECTORS_AT_ONCE
from streams.gateway.request.check_process import CHECK_PROCESS
from tests.streams.bridge.samples import CODEC, AskingBridge, limits, pair, record, told
from tests.streams.gateway.samples import MODEL, frame
from tests.virtual import virtual
from tests.waiting import pass_time, until

TRACE = ("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


@virtual
async def test_a_prompt_is_asked_as_a_call_is() -> None:
    bridge = AskingBridge()
    bridge.each(bridge.answer("Hel", "lo"))
    (sending,) = await bridge.settle(record({"text": "hi"}, headers=[TRACE]))
    answer = told([sending])
    assert (answer.text, answer.tries, answer.error_code) == ("Hello", 1, None)
    (request,) = bridge.log.requests
    assert answer.request_id == request.request_id and request.keeps_running
    assert (request.tenant, request.priority) == ("", "batch")
    assert bridge.may_send == [bridge.log.partition] == [request.gateway_partition]
    assert dict(bridge.log.headers[0])["traceparent"][:35] == TRACE[1][:35]


@virtual
async def test_ids_follow_from_where_the_prompt_lies() -> None:
    """So that whoever asks again asks the same."""
    ids = {}
    for name, cluster, offset in (("a", "", 7), ("b", "", 7), ("c", "x.", 7), ("d", "", 8)):
        bridge = AskingBridge(cluster=cluster)
        bridge.each(bridge.fail(WorkerLost("w")), bridge.answer("a"))
        await bridge.settle(record({"text": "hi"}, offset=offset))
        ids[name] = [(each.request_id, each.session_id) for each in bridge.log.requests]
    assert ids["a"][1] == ("q0000000005xk48fvmqk3hmsqqf", ids["a"][0][1]), "of any version"
    made = record({"text": "hi"}, timestamp_ms=-1)  # of a topic without times
    assert AskingBridge(cluster="c.").asking._ids(made, 1)[0] == "q0000000000stwnpy3sq72cy739"
    assert ids["a"] == ids["b"] and len({each for one in ids.values() for each in one}) == 6
    assert all(len({session for _, session in one}) == 1 for one in ids.values()), "one session"


@virtual
async def test_what_may_pass_is_asked_again_until_it_has_its_answer() -> None:
    bridge = AskingBridge()
    bridge.each(bridge.fail(WorkerLost("w")), bridge.fail(WorkerLost("w")), bridge.answer("a"))
    (sending,) = await bridge.settle()
    assert (told([sending]).text, told([sending]).tries) == ("a", 3)


@virtual
async def test_an_answer_that_breaks_its_schema_is_asked_for_again() -> None:
    bridge = AskingBridge()
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    bridge.each(bridge.answer('"7"'), bridge.answer("7"))
    answer = told(await bridge.settle(record({"text": "hi", "response_format": schema})))
    assert (answer.parsed, answer.tries) == ("7", 2)


@virtual
async def test_the_last_try_stands() -> None:
    """As an answer and a dead letter, with who had it."""
    bridge = AskingBridge(pair(format="avro", tries_max=2, fallback="none"))
    bridge.each(bridge.fail(WorkerLost("worker w fell silent")))
    began_ms = wall_ms()
    made = record({"text": "hi", "max_tokens": 9, "metadata": {"row": 3}})
    sends = await bridge.settle(made)
    answer, letter = told(sends), dict(sends[1].headers)
    assert (answer.error_code, answer.error_retriable, answer.tries) == ("worker_lost", True, 2)
    assert (answer.asked_ms, answer.ended_ms) == (began_ms, wall_ms())
    assert answer.metadata == '{"row":3}'
    assert (answer.text, answer.fallback) == ("none", True)
    assert sends[1].topic == "rows.dlq" and sends[1].value == made.value
    assert letter["x-dlq-attempts"] == b"2" and letter["x-dlq-reason"] == b"failed"
    assert letter["x-dlq-worker"] == b"decode-1"
    assert letter["x-dlq-request-id"].decode() == answer.request_id != ""


@virtual
async def test_a_dead_letter_of_what_nobody_was_asked_names_nobody() -> None:
    bridge = AskingBridge()
    asked = await bridge.asked(record({"text": "hi"}))
    letter = dict(bridge.asking.error_records(asked, NotReady("away"))[1].headers)
    names = ("worker", "reason", "request-id", "attempts")
    assert [letter[f"x-dlq-{name}"] for name in names] == [b"", b"", b"", b"0"]


@virtual
async def test_errors_that_topics_have_refused_become_smaller() -> None:
    bridge = AskingBridge(pair(format="avro", fallback="none"))
    made = record({"text": "hi", "metadata": {"row": 3}})
    asked, found = await bridge.asked(made), []
    for less in range(4):
        sends = bridge.asking.error_records(asked, NotReady("away"), steps=less)
        found.append((told(sends).metadata, told(sends).text, sends[0].key, sends[1].value))
    assert found == [
        ('{"row":3}', "none", b"k", made.value),
        (None, "none", b"k", None),
        (None, None, b"k", None),
        (None, None, b"", None),
    ]


@virtual
async def test_what_this_side_ends_is_given_up() -> None:
    """Nobody else knows of it; what a worker has ended wants no word."""
    bridge = AskingBridge(pair(format="avro", tries_max=1))
    bridge.each(bridge.fail(WorkerLost("w")))
    await bridge.settle()
    bridge.log.on_request = None
    settling = asyncio.ensure_future(bridge.settle(record({"text": "hi"}, offset=8)))
    await bridge.log.wait_sent(2)
    *_, call = bridge.asking.gateway.calls
    assert [stream.choice for stream in call.streams] == [0] and call.tolerates_difference is False
    assert not bridge.log.cancellations
    call.fail(DeadlineExceeded("late"))
    assert told(await settling).error_code == "deadline_exceeded"
    await until(lambda: bool(bridge.log.cancellations))
    (cancellation,) = bridge.log.cancellations
    assert cancellation.request_id == call.key.parent_id


@virtual
async def test_calls_for_vectors_have_places_of_their_own() -> None:
    slots = AskingBridge().asking.vector_slots
    for _ in range(VECTORS_AT_ONCE):
        await slots.acquire("a")
    waiting = asyncio.ensure_future(slots.acquire("b"))
    await pass_time(1.0)
    assert not waiting.done()
    slots.release("a")
    await waiting


@virtual
async def test_whose_prompt_is_checked_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever checks takes turns between tenants."""
    bridge, owners, check = AskingBridge(), list[str](), CHECK_PROCESS.check
    bridge.each(bridge.answer("7"))

    async def note(*arguments: Any, **named: Any) -> Any:
        owners.extend(each for each in (*arguments, *named.values()) if each == "rows/")
        return await check(*arguments, **named)

    monkeypatch.setattr(CHECK_PROCESS, "check", note)
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    await bridge.settle(record({"text": "hi", "response_format": schema}))
    form = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}}
    await bridge.settle(line("/v1/responses", input="hi", text=form))
    assert owners == ["rows/"] * 2


@virtual
async def test_its_deadline_is_late() -> None:
    bridge = AskingBridge()
    asked = await bridge.asked(record({"text": "hi", "deadline_ms": 5_000}))
    asked.asked_ms, error = wall_ms() - 4_999, WorkerLost("w")
    assert bridge.asking.should_retry(asked, error)
    asked.asked_ms -= 1
    assert not bridge.asking.should_retry(asked, error)


@virtual
async def test_what_will_not_pass_is_asked_once() -> None:
    bridge = AskingBridge()
    bridge.each(bridge.answer("a"))
    sends = await bridge.settle(record({"text": "hi", "model": "other"}))
    assert told(sends).error_code == "model_not_found" and bridge.log.requests == []


@virtual
async def test_nothing_is_asked_again_when_it_is_late() -> None:
    bridge = AskingBridge()

    def late(request: Request) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(6, bridge.fail(WorkerLost("w")), request)

    bridge.each(late)
    answer = told(await bridge.settle(record({"text": "hi", "deadline_ms": 5_000})))
    assert (answer.error_code, answer.tries) == ("worker_lost", 1)


@virtual
async def test_a_broker_that_is_away_is_waited_for() -> None:
    bridge = AskingBridge()
    bridge.each(bridge.answer("a"))
    bridge.log.failures = 3
    answer = told(await bridge.settle())
    assert (answer.text, answer.tries) == ("a", 1), "the same try"
    bridge.log.failures = 10_000
    answer = told(await bridge.settle(record({"text": "hi", "deadline_ms": 5_000})))
    assert (answer.error_code, answer.tries) == ("deadline_exceeded", 1)


@virtual
async def test_prompts_beside_it_that_are_being_checked_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bridge that has just started checks many at once."""
    bridge = AskingBridge(pair(format="avro", tries_max=2))
    bridge.each(bridge.answer("7"))
    checked, refusals = CHECK_PROCESS.check, iter(range(6))

    async def check(*arguments: Any) -> str:
        if next(refusals, None) is not None:
            raise TooManyRequests("32 calls for checking it wait; try again")
        return await checked(*arguments)

    monkeypatch.setattr(CHECK_PROCESS, "check", check)
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    prompt = {"text": "hi", "response_format": schema, "deadline_ms": 9_000}
    answer = told(await bridge.settle(record(prompt)))
    assert (answer.parsed, answer.tries, answer.error_code) == ("7", 1, None)
    refusals = iter(range(10_000))
    answer = told(await bridge.settle(record(prompt)))
    assert (answer.error_code, answer.error_retriable) == ("too_many_requests", True)


@virtual
async def test_who_may_not_ask_says_so() -> None:
    bridge = AskingBridge()
    found = await bridge.asked(record({"text": "hi"}))

    async def may_send(_: int) -> None:
        raise LeaseError("was away")

    with pytest.raises(LeaseError):
        await bridge.asking.settle(found, may_send)


@virtual
async def test_a_mistake_of_ours_is_the_error_of_one_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bridge = AskingBridge()
    bridge.each(bridge.answer("a"))

    async def answer(*_: Any, **__: Any) -> Answer:
        raise TypeError("ours")

    monkeypatch.setattr(bridge.ends.answers, "answer", answer)
    assert told(await bridge.settle()).error_message == "not answered: TypeError: ours"


@virtual
async def test_an_answer_larger_than_its_topic_takes_is_an_error() -> None:
    """And its dead letter fits into theirs."""
    bridge = AskingBridge()
    of = limits(2_000, letters=1_500)
    answers = AnswerBuilder(bridge.ends.pair, CODEC, of)
    bridge.ends = PairIO(bridge.ends.pair, bridge.ends.prompts, answers, of)
    bridge.each(bridge.answer("x" * 3_000))
    prompt = record({"text": "hi", "metadata": {"a": "x" * 1_600}})
    sends = await bridge.settle(prompt)
    assert told(sends).error_code == "record_too_large" and told(sends).tries == 1
    assert "raise max.message.bytes of rows.answers" in (told(sends).error_message or "")
    assert told(sends).metadata is None and sends[0].key == b"k"
    assert sends[1].value is None and dict(sends[1].headers)["x-dlq-offset"] == b"7"


@virtual
async def test_lines_of_a_batch_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge = AskingBridge()
    made = PromptRecord(
        topic="batch.prompts",
        partition=0,
        offset=1,
        timestamp_ms=1,
        key=b"ada/batch_1/0/c",
        value=b'{"body": {"prompt": "hi"}}',
    )
    bridge.each(bridge.answer("a"))
    (sending,) = await bridge.settle(made)
    assert told([sending]).text == "a"
    assert bridge.log.requests[0].tenant == "ada", "whose batch it is"
    monkeypatch.setattr(bridge.table.batches, "is_given_up", lambda key, now_ms: key[:3] == "ada")
    (sending,) = await bridge.settle(made)
    answer = told([sending])
    assert (answer.error_code, answer.error_message) == ("cancelled", "its batch was given up")
    assert len(bridge.log.requests) == 1


def line(endpoint: str, **body: Any) -> PromptRecord:
    """A line of a batch of such calls."""
    return record({"body": {"model": MODEL, **body}, "endpoint": endpoint})


@virtual
async def test_a_call_of_responses_is_answered_by_a_response() -> None:
    """As the `openai` package reads it; one that a predecessor has asked, too."""
    bridge = AskingBridge()
    bridge.each(bridge.answer("Hel", "lo"))
    made = line("/v1/responses", input="hi", instructions="Greet", metadata={"a": "b"})
    answer = told(await bridge.settle(made))
    found = Response.model_validate_json(answer.body or "")
    assert (found.output_text, found.status, found.metadata) == ("Hello", "completed", {"a": "b"})
    assert (answer.text, found.instructions) == ("Hello", "Greet")
    assert found.usage is not None and found.usage.output_tokens == answer.completion_tokens == 2
    assert found.store is False  # type: ignore[attr-defined]  # no field of the package's
    recovered = await bridge.asked(made)
    bridge.asking.begin(recovered)
    bridge.answer("a")(bridge.log.requests[0])
    again = await bridge.asking.outcome(recovered)
    assert isinstance(again, Answer)
    assert Response.model_validate_json(again.body or "").output_text == "a"


@virtual
async def test_a_call_for_vectors_is_answered_by_the_embedding_pool() -> None:
    """No router is asked."""
    bridge = AskingBridge()
    call = {"body": {"input": ["a", "bb"], "model": "letters"}, "endpoint": "/v1/embeddings"}
    answer = told(await bridge.settle(record({**call, "metadata": {"row": 3}})))
    found = CreateEmbeddingResponse.model_validate_json(answer.body or "")
    assert [np.argmax(each.embedding) for each in found.data] == [0, 1]
    assert (answer.model, answer.prompt_tokens, answer.tries) == ("letters@1", 3, 1)
    assert answer.error_code is None and bridge.log.requests == []
    assert answer.asked_ms == answer.ended_ms == wall_ms()
    assert answer.metadata == '{"row":3}'
    other = told(await bridge.settle(line("/v1/embeddings", input="a", model="other")))
    assert (other.error_code, other.tries) == ("model_not_found", 1)


@virtual
async def test_a_call_for_vectors_tells_the_pool_whose_it_is_and_until_when() -> None:
    bridge = AskingBridge()
    call = {"body": {"model": "letters", "input": "a"}, "endpoint": "/v1/embeddings"}
    made = record({**call, "deadline_ms": 9_000}, key=b"k")
    await bridge.settle(made)
    assert bridge.pool.embedded == [(wall_ms() + 9_000, bridge.asking.lines.owner(made))]


@virtual
async def test_what_is_read_with_care_is_checked_and_nothing_comes_of_it() -> None:
    bridge = AskingBridge()
    for value in ({"text": "hi"}, {"text": "x" * 400_000}):
        await bridge.asking.check(await bridge.asked(record(value)))
    await bridge.asking.check(await bridge.asked(line("/v1/embeddings", input="a", model="m")))
    assert bridge.log.requests == []
    asked = await bridge.asked(line("/v1/responses", input="hi"))
    await bridge.asking.check(asked)
    assert asked.intake is not None, "it was checked"


@virtual
async def test_a_call_is_told_of_once_something_has_come() -> None:
    bridge = AskingBridge()
    asked = await bridge.asked(record({"text": "hi"}))
    assert not bridge.asking.has_output(asked)
    call = bridge.asking.begin(asked)
    assert not bridge.asking.has_output(asked)
    await bridge.log.push(frame(call.key.parent_id, ["a"]))
    assert bridge.asking.has_output(asked)
    bridge.asking.release(asked)
    assert asked.call is None and not bridge.asking.has_output(asked)


@virtual
async def test_an_embedding_pool_that_is_away_is_waited_for() -> None:
    """Until the deadline; that it is away is no try."""
    bridge = AskingBridge(pair(format="avro", tries_max=3))
    bridge.pool.trouble = NotReady("no embedding worker is ready")
    call = {"body": {"model": "letters", "input": "a"}, "endpoint": "/v1/embeddings"}
    made = record({**call, "deadline_ms": 10_000})
    settling = asyncio.ensure_future(bridge.settle(made))
    await pass_time(6)
    assert not settling.done()
    bridge.pool.trouble = None
    assert told(await settling).error_code is None
    bridge.pool.trouble = WorkerLost("its worker fell silent")
    calls = len(bridge.pool.embedded)
    settling = asyncio.ensure_future(bridge.settle(made))
    await until(lambda: len(bridge.pool.embedded) > calls)
    bridge.pool.trouble = None
    assert told(await settling).tries == 2
    bridge.pool.trouble = WorkerLost("its worker fell silent")
    answer = told(await bridge.settle(made))
    assert (answer.error_code, answer.tries) == ("worker_lost", 3)
    bridge.pool.trouble = NotReady("no embedding worker is ready")
    answer = told(await bridge.settle(made))
    assert (answer.error_code, answer.error_retriable) == ("not_ready", True)


@virtual
async def test_what_is_being_sent_is_waited_for() -> None:
    """Before others may own the partition."""
    bridge = AskingBridge()
    bridge.each(bridge.answer("a"))
    bridge.log.hold_acks = asyncio.Event()
    settling = asyncio.ensure_future(bridge.settle())
    await until(lambda: bool(bridge.may_send))
    await pass_time(0.1)
    waiting = asyncio.ensure_future(bridge.asking.wait_until_sent())
    await pass_time(1)
    assert not waiting.done()
    bridge.log.hold_acks.set()
    await waiting
    await settling
    await bridge.asking.wait_until_sent()


@pytest.mark.parametrize(("count", "found"), [(4, 1), (1, 0)])
@virtual
async def test_answers_lie_where_their_topic_has_a_partition(count: int, found: int) -> None:
    bridge = AskingBridge()
    bridge.asking.partitions = {"rows.answers": count}
    made = OutgoingRecord(topic="rows.answers", partition=1, key=b"", value=b"")
    assert bridge.asking.fitting(made).partition == found


@virtual
async def test_an_answer_that_its_topic_takes_by_now_is_one() -> None:
    """Operators raise `max.message.bytes` while bridges run."""
    bridge = AskingBridge()
    takes = {"rows.answers": 2_000}
    asked = 0

    async def ask() -> dict[str, int]:
        nonlocal asked
        asked += 1
        return dict(takes)

    of = TopicLimits(ask, takes)
    bridge.ends = PairIO(
        bridge.ends.pair, bridge.ends.prompts, AnswerBuilder(bridge.ends.pair, CODEC, of), of
    )
    bridge.each(bridge.answer("x" * 3_000))
    for _ in range(2):
        assert told(await bridge.settle()).error_code == "record_too_large"
    assert asked == 1, "within a second once"
    takes["rows.answers"] = 9_000
    await of.refresh()
    assert told(await bridge.settle()).text == "x" * 3_000
    assert asked == 2, "and none was asked about what fits"
