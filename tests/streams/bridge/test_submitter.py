"""One prompt at the routers, until it has an answer or an error that stands; on virtual time, by a
gateway's own way in, over a log in memory."""

import asyncio
from typing import Any

import numpy as np
import pytest
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.responses import Response

from schemas.errors import (
    DeadlineExceeded,
    LeaseError,
    NotReady,
    TooManyRequests,
    WorkerLost,
)
from schemas.records import Answer, Request
from streams.bridge.answers import AnswerBuilder
from streams.bridge.limits import TopicLimits
from streams.bridge.pending_prompt import PairIO
from streams.bridge.records.record import PromptRecord
from streams.bridge.submitter import VECTORS_AT_ONCE
from streams.calls.request.check_process import CHECK_PROCESS
from streams.log.clock import wall_ms
from streams.log.transactions import OutgoingRecord
from tests.streams.bridge.samples import CODEC, AskingBridge, answer_of, limits, pair, record
from tests.streams.gateway.samples import MODEL, frame
from tests.virtual_time import virtual
from tests.waits import pass_time, until

TRACE = ("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


@virtual
async def test_submitter_sends_prompt_like_api_call() -> None:
    bridge = AskingBridge()
    bridge.answer_in_turn(bridge.answer("Hel", "lo"))
    (sending,) = await bridge.settle(record({"text": "hi"}, headers=[TRACE]))
    answer = answer_of([sending])
    assert (answer.text, answer.tries, answer.error_code) == ("Hello", 1, None)
    (request,) = bridge.log.requests
    assert answer.request_id == request.request_id and request.keeps_running
    assert (request.tenant, request.priority) == ("", "batch")
    assert bridge.may_send == [bridge.log.partition] == [request.gateway_partition]
    assert dict(bridge.log.headers[0])["traceparent"][:35] == TRACE[1][:35]


@virtual
async def test_submitter_derives_ids_from_prompt_offset() -> None:
    """A bridge that resubmits a prompt uses the same ids."""
    ids = {}
    for name, cluster, offset in (("a", "", 7), ("b", "", 7), ("c", "x.", 7), ("d", "", 8)):
        bridge = AskingBridge(cluster=cluster)
        bridge.answer_in_turn(bridge.fail(WorkerLost("w")), bridge.answer("a"))
        await bridge.settle(record({"text": "hi"}, offset=offset))
        ids[name] = [(request.request_id, request.session_id) for request in bridge.log.requests]
    assert ids["a"][1] == ("q0000000005xk48fvmqk3hmsqqf", ids["a"][0][1]), "of any version"
    prompt_record = record({"text": "hi"}, timestamp_ms=-1)  # of a topic without times
    assert (
        AskingBridge(cluster="c.").asking._ids(prompt_record, 1)[0] == "q0000000000stwnpy3sq72cy739"
    )
    assert (
        ids["a"] == ids["b"]
        and len({id_pair for id_pairs in ids.values() for id_pair in id_pairs}) == 6
    )
    assert all(len({session for _, session in id_pairs}) == 1 for id_pairs in ids.values()), (
        "one session"
    )


@virtual
async def test_submitter_retries_transient_errors() -> None:
    bridge = AskingBridge()
    bridge.answer_in_turn(
        bridge.fail(WorkerLost("w")), bridge.fail(WorkerLost("w")), bridge.answer("a")
    )
    (sending,) = await bridge.settle()
    assert (answer_of([sending]).text, answer_of([sending]).tries) == ("a", 3)


@virtual
async def test_submitter_retries_answer_that_breaks_schema() -> None:
    bridge = AskingBridge()
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    bridge.answer_in_turn(bridge.answer('"7"'), bridge.answer("7"))
    answer = answer_of(await bridge.settle(record({"text": "hi", "response_format": schema})))
    assert (answer.parsed, answer.tries) == ("7", 2)


@virtual
async def test_submitter_reports_last_try_as_answer_and_dead_letter() -> None:
    """The dead letter names the worker of the last try."""
    bridge = AskingBridge(pair(format="avro", tries_max=2, fallback="none"))
    bridge.answer_in_turn(bridge.fail(WorkerLost("worker w fell silent")))
    began_ms = wall_ms()
    prompt_record = record({"text": "hi", "max_tokens": 9, "metadata": {"row": 3}})
    sends = await bridge.settle(prompt_record)
    answer, letter = answer_of(sends), dict(sends[1].headers)
    assert (answer.error_code, answer.error_retriable, answer.tries) == ("worker_lost", True, 2)
    assert (answer.asked_ms, answer.ended_ms) == (began_ms, wall_ms())
    assert answer.metadata == '{"row":3}'
    assert (answer.text, answer.fallback) == ("none", True)
    assert sends[1].topic == "rows.dlq" and sends[1].value == prompt_record.value
    assert letter["x-dlq-attempts"] == b"2" and letter["x-dlq-reason"] == b"failed"
    assert letter["x-dlq-worker"] == b"decode-1"
    assert letter["x-dlq-request-id"].decode() == answer.request_id != ""


@virtual
async def test_dead_letter_before_first_try_names_no_worker() -> None:
    bridge = AskingBridge()
    prompt = await bridge.pending_prompt(record({"text": "hi"}))
    letter = dict(bridge.asking.error_records(prompt, NotReady("away"))[1].headers)
    names = ("worker", "reason", "request-id", "attempts")
    assert [letter[f"x-dlq-{name}"] for name in names] == [b"", b"", b"", b"0"]


@virtual
async def test_submitter_shrinks_refused_error_records() -> None:
    bridge = AskingBridge(pair(format="avro", fallback="none"))
    prompt_record = record({"text": "hi", "metadata": {"row": 3}})
    prompt, error_forms = await bridge.pending_prompt(prompt_record), []
    for less in range(4):
        sends = bridge.asking.error_records(prompt, NotReady("away"), steps=less)
        error_forms.append(
            (answer_of(sends).metadata, answer_of(sends).text, sends[0].key, sends[1].value)
        )
    assert error_forms == [
        ('{"row":3}', "none", b"k", prompt_record.value),
        (None, "none", b"k", None),
        (None, None, b"k", None),
        (None, None, b"", None),
    ]


@virtual
async def test_submitter_cancels_request_after_local_failure() -> None:
    """Only the submitter knows of that failure; one that a worker reports is not cancelled."""
    bridge = AskingBridge(pair(format="avro", tries_max=1))
    bridge.answer_in_turn(bridge.fail(WorkerLost("w")))
    await bridge.settle()
    bridge.log.on_request = None
    settling = asyncio.ensure_future(bridge.settle(record({"text": "hi"}, offset=8)))
    await bridge.log.wait_sent(2)
    *_, call = bridge.asking.calls._calls
    assert [stream.choice for stream in call.streams] == [0] and call.tolerates_difference is False
    assert not bridge.log.cancellations
    call.fail(DeadlineExceeded("late"))
    assert answer_of(await settling).error_code == "deadline_exceeded"
    await until(lambda: bool(bridge.log.cancellations))
    (cancellation,) = bridge.log.cancellations
    assert cancellation.request_id == call.key.parent_id


@virtual
async def test_submitter_limits_embedding_calls_separately() -> None:
    slots = AskingBridge().asking.vector_slots
    for _ in range(VECTORS_AT_ONCE):
        await slots.acquire("a")
    waiting = asyncio.ensure_future(slots.acquire("b"))
    await pass_time(1.0)
    assert not waiting.done()
    slots.release("a")
    await waiting


@virtual
async def test_submitter_check_names_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check processes take turns between owners."""
    bridge, owners, check = AskingBridge(), list[str](), CHECK_PROCESS.check
    bridge.answer_in_turn(bridge.answer("7"))

    async def note(*arguments: Any, **options: Any) -> Any:
        owners.extend(
            argument for argument in (*arguments, *options.values()) if argument == "rows/"
        )
        return await check(*arguments, **options)

    monkeypatch.setattr(CHECK_PROCESS, "check", note)
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    await bridge.settle(record({"text": "hi", "response_format": schema}))
    form = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}}
    await bridge.settle(line("/v1/responses", input="hi", text=form))
    assert owners == ["rows/"] * 2


@virtual
async def test_submitter_stops_retries_after_deadline() -> None:
    bridge = AskingBridge()
    prompt = await bridge.pending_prompt(record({"text": "hi", "deadline_ms": 5_000}))
    prompt.asked_ms, error = wall_ms() - 4_999, WorkerLost("w")
    assert bridge.asking.should_retry(prompt, error)
    prompt.asked_ms -= 1
    assert not bridge.asking.should_retry(prompt, error)


@virtual
async def test_submitter_does_not_retry_permanent_error() -> None:
    bridge = AskingBridge()
    bridge.answer_in_turn(bridge.answer("a"))
    sends = await bridge.settle(record({"text": "hi", "model": "other"}))
    assert answer_of(sends).error_code == "model_not_found" and bridge.log.requests == []


@virtual
async def test_submitter_does_not_retry_late_failure() -> None:
    bridge = AskingBridge()

    def late(request: Request) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(6, bridge.fail(WorkerLost("w")), request)

    bridge.answer_in_turn(late)
    answer = answer_of(await bridge.settle(record({"text": "hi", "deadline_ms": 5_000})))
    assert (answer.error_code, answer.tries) == ("worker_lost", 1)


@virtual
async def test_submitter_waits_for_unavailable_broker() -> None:
    bridge = AskingBridge()
    bridge.answer_in_turn(bridge.answer("a"))
    bridge.log.failures = 3
    answer = answer_of(await bridge.settle())
    assert (answer.text, answer.tries) == ("a", 1), "the same try"
    bridge.log.failures = 10_000
    answer = answer_of(await bridge.settle(record({"text": "hi", "deadline_ms": 5_000})))
    assert (answer.error_code, answer.tries) == ("deadline_exceeded", 1)


@virtual
async def test_submitter_waits_for_busy_check_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bridge that has just started checks many prompts at once."""
    bridge = AskingBridge(pair(format="avro", tries_max=2))
    bridge.answer_in_turn(bridge.answer("7"))
    checked, refusals = CHECK_PROCESS.check, iter(range(6))

    async def check(*arguments: Any) -> str:
        if next(refusals, None) is not None:
            raise TooManyRequests("32 calls for checking it wait; try again")
        return await checked(*arguments)

    monkeypatch.setattr(CHECK_PROCESS, "check", check)
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    prompt = {"text": "hi", "response_format": schema, "deadline_ms": 9_000}
    answer = answer_of(await bridge.settle(record(prompt)))
    assert (answer.parsed, answer.tries, answer.error_code) == ("7", 1, None)
    refusals = iter(range(10_000))
    answer = answer_of(await bridge.settle(record(prompt)))
    assert (answer.error_code, answer.error_retriable) == ("too_many_requests", True)


@virtual
async def test_submitter_raises_lease_error_without_permission() -> None:
    bridge = AskingBridge()
    prompt = await bridge.pending_prompt(record({"text": "hi"}))

    async def may_send(_: int) -> None:
        raise LeaseError("was away")

    with pytest.raises(LeaseError):
        await bridge.asking.settle(prompt, may_send)


@virtual
async def test_submitter_reports_builder_exception_as_error_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bridge = AskingBridge()
    bridge.answer_in_turn(bridge.answer("a"))

    async def answer(*_: Any, **__: Any) -> Answer:
        raise TypeError("ours")

    monkeypatch.setattr(bridge.ends.answers, "answer", answer)
    assert answer_of(await bridge.settle()).error_message == "not answered: TypeError: ours"


@virtual
async def test_submitter_replaces_too_large_answer_with_error() -> None:
    """Its dead letter fits into the topic of dead letters."""
    bridge = AskingBridge()
    of = limits(2_000, letters=1_500)
    answers = AnswerBuilder(bridge.ends.pair, CODEC, of)
    bridge.ends = PairIO(bridge.ends.pair, bridge.ends.prompts, answers, of)
    bridge.answer_in_turn(bridge.answer("x" * 3_000))
    prompt = record({"text": "hi", "metadata": {"a": "x" * 1_600}})
    sends = await bridge.settle(prompt)
    assert answer_of(sends).error_code == "record_too_large" and answer_of(sends).tries == 1
    assert "raise max.message.bytes of rows.answers" in (answer_of(sends).error_message or "")
    assert answer_of(sends).metadata is None and sends[0].key == b"k"
    assert sends[1].value is None and dict(sends[1].headers)["x-dlq-offset"] == b"7"


@virtual
async def test_submitter_cancels_lines_of_abandoned_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge = AskingBridge()
    prompt_record = PromptRecord(
        topic="batch.prompts",
        partition=0,
        offset=1,
        timestamp_ms=1,
        key=b"ada/batch_1/0/c",
        value=b'{"body": {"prompt": "hi"}}',
    )
    bridge.answer_in_turn(bridge.answer("a"))
    (sending,) = await bridge.settle(prompt_record)
    assert answer_of([sending]).text == "a"
    assert bridge.log.requests[0].tenant == "ada", "whose batch it is"
    monkeypatch.setattr(bridge.table.batches, "is_given_up", lambda key, now_ms: key[:3] == "ada")
    (sending,) = await bridge.settle(prompt_record)
    answer = answer_of([sending])
    assert (answer.error_code, answer.error_message) == ("cancelled", "its batch was given up")
    assert len(bridge.log.requests) == 1


def line(endpoint: str, **body: Any) -> PromptRecord:
    """Return a line of a batch of such calls."""
    return record({"body": {"model": MODEL, **body}, "endpoint": endpoint})


@virtual
async def test_submitter_answers_responses_call_with_response() -> None:
    """The `openai` package can parse it, and that of a resumed request."""
    bridge = AskingBridge()
    bridge.answer_in_turn(bridge.answer("Hel", "lo"))
    prompt_record = line("/v1/responses", input="hi", instructions="Greet", metadata={"a": "b"})
    answer = answer_of(await bridge.settle(prompt_record))
    response = Response.model_validate_json(answer.body or "")
    assert (response.output_text, response.status, response.metadata) == (
        "Hello",
        "completed",
        {"a": "b"},
    )
    assert (answer.text, response.instructions) == ("Hello", "Greet")
    assert (
        response.usage is not None and response.usage.output_tokens == answer.completion_tokens == 2
    )
    assert response.store is False  # type: ignore[attr-defined]  # no field of the package's
    recovered = await bridge.pending_prompt(prompt_record)
    bridge.asking.begin(recovered)
    bridge.answer("a")(bridge.log.requests[0])
    outcome = await bridge.asking.outcome(recovered)
    assert isinstance(outcome, Answer)
    assert Response.model_validate_json(outcome.body or "").output_text == "a"


@virtual
async def test_submitter_repeats_prompt_in_body_of_completion() -> None:
    """Also in that of a request which another bridge has sent."""
    bridge = AskingBridge(pair(format="avro", body=True))
    bridge.answer_in_turn(bridge.answer("Hel", "lo"))
    prompt_record = line("/v1/completions", prompt="hi ", echo=True)
    answer = answer_of(await bridge.settle(prompt_record))
    assert Completion.model_validate_json(answer.body or "").choices[0].text == "hi Hello"
    assert answer.text == "Hello"
    recovered = await bridge.pending_prompt(prompt_record)
    bridge.asking.begin(recovered)
    bridge.answer("a")(bridge.log.requests[0])
    outcome = await bridge.asking.outcome(recovered)
    assert isinstance(outcome, Answer)
    assert Completion.model_validate_json(outcome.body or "").choices[0].text == "hi a"


@virtual
async def test_submitter_answers_embedding_call_from_pool() -> None:
    """No router gets a request."""
    bridge = AskingBridge()
    call: dict[str, Any] = {"body": {"input": ["a", "bb"]}, "endpoint": "/v1/embeddings"}
    answer = answer_of(await bridge.settle(record(call)))
    assert (answer.model, answer.error_code) == ("letters@1", None), "the first embedding model"
    call["body"]["model"] = "letters"
    answer = answer_of(await bridge.settle(record({**call, "metadata": {"row": 3}})))
    response = CreateEmbeddingResponse.model_validate_json(answer.body or "")
    assert [np.argmax(embedding.embedding) for embedding in response.data] == [0, 1]
    assert (answer.model, answer.prompt_tokens, answer.tries) == ("letters@1", 3, 1)
    assert answer.error_code is None and bridge.log.requests == []
    assert answer.asked_ms == answer.ended_ms == wall_ms()
    assert answer.metadata == '{"row":3}'
    rejection = answer_of(await bridge.settle(line("/v1/embeddings", input="a", model="other")))
    assert (rejection.error_code, rejection.tries) == ("model_not_found", 1)


@virtual
async def test_embedding_call_carries_owner_and_deadline() -> None:
    bridge = AskingBridge()
    call = {"body": {"model": "letters", "input": "a"}, "endpoint": "/v1/embeddings"}
    prompt_record = record({**call, "deadline_ms": 9_000}, key=b"k")
    await bridge.settle(prompt_record)
    assert bridge.pool.embedded == [(wall_ms() + 9_000, bridge.asking.lines.owner(prompt_record))]


@virtual
async def test_submitter_check_sends_no_request() -> None:
    bridge = AskingBridge()
    for value in ({"text": "hi"}, {"text": "x" * 400_000}):
        await bridge.asking.check(await bridge.pending_prompt(record(value)))
    await bridge.asking.check(
        await bridge.pending_prompt(line("/v1/embeddings", input="a", model="m"))
    )
    assert bridge.log.requests == []
    prompt = await bridge.pending_prompt(line("/v1/responses", input="hi"))
    await bridge.asking.check(prompt)
    assert prompt.intake is not None, "it was checked"


@virtual
async def test_submitter_has_output_after_first_frame() -> None:
    bridge = AskingBridge()
    prompt = await bridge.pending_prompt(record({"text": "hi"}))
    assert not bridge.asking.has_output(prompt)
    call = bridge.asking.begin(prompt)
    assert not bridge.asking.has_output(prompt)
    await bridge.log.push(frame(call.key.parent_id, ["a"]))
    assert bridge.asking.has_output(prompt)
    bridge.asking.release(prompt)
    assert prompt.call is None and not bridge.asking.has_output(prompt)


@virtual
async def test_submitter_waits_for_unavailable_embedding_pool() -> None:
    """It waits until the deadline; an unavailable pool does not count as a try."""
    bridge = AskingBridge(pair(format="avro", tries_max=3))
    bridge.pool.trouble = NotReady("no embedding worker is ready")
    call = {"body": {"model": "letters", "input": "a"}, "endpoint": "/v1/embeddings"}
    prompt_record = record({**call, "deadline_ms": 10_000})
    settling = asyncio.ensure_future(bridge.settle(prompt_record))
    await pass_time(6)
    assert not settling.done()
    bridge.pool.trouble = None
    assert answer_of(await settling).error_code is None
    bridge.pool.trouble = WorkerLost("its worker fell silent")
    calls = len(bridge.pool.embedded)
    settling = asyncio.ensure_future(bridge.settle(prompt_record))
    await until(lambda: len(bridge.pool.embedded) > calls)
    bridge.pool.trouble = None
    assert answer_of(await settling).tries == 2
    bridge.pool.trouble = WorkerLost("its worker fell silent")
    answer = answer_of(await bridge.settle(prompt_record))
    assert (answer.error_code, answer.tries) == ("worker_lost", 3)
    bridge.pool.trouble = NotReady("no embedding worker is ready")
    answer = answer_of(await bridge.settle(prompt_record))
    assert (answer.error_code, answer.error_retriable) == ("not_ready", True)


@virtual
async def test_submitter_waits_until_sends_are_acknowledged() -> None:
    """This comes before other bridges may own the partition."""
    bridge = AskingBridge()
    bridge.answer_in_turn(bridge.answer("a"))
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


@pytest.mark.parametrize(("count", "partition"), [(4, 1), (1, 0)])
@virtual
async def test_submitter_fits_answer_to_partitions_of_topic(count: int, partition: int) -> None:
    bridge = AskingBridge()
    bridge.asking.partitions = {"rows.answers": count}
    outgoing = OutgoingRecord(topic="rows.answers", partition=1, key=b"", value=b"")
    assert bridge.asking.fitting(outgoing).partition == partition


@virtual
async def test_submitter_refreshes_topic_limits() -> None:
    """Operators raise `max.message.bytes` while bridges run."""
    bridge = AskingBridge()
    takes = {"rows.answers": 2_000}
    refreshes = 0

    async def ask() -> dict[str, int]:
        nonlocal refreshes
        refreshes += 1
        return dict(takes)

    of = TopicLimits(ask, takes)
    bridge.ends = PairIO(
        bridge.ends.pair, bridge.ends.prompts, AnswerBuilder(bridge.ends.pair, CODEC, of), of
    )
    bridge.answer_in_turn(bridge.answer("x" * 3_000))
    for _ in range(2):
        assert answer_of(await bridge.settle()).error_code == "record_too_large"
    assert refreshes == 1, "within a second once"
    takes["rows.answers"] = 9_000
    await of.refresh()
    assert answer_of(await bridge.settle()).text == "x" * 3_000
    assert refreshes == 2, "and none was asked about what fits"
