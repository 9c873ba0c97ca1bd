"""Submits prompts to the routers, and retries until there is an answer or a final error.

Request ids are computed from the prompt's position, so another bridge that submits it again uses
the same ids, and routers drop ids that they know. A request does not end with its bridge, and its
tokens stay in the log.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Container, Mapping
from contextlib import suppress
from dataclasses import replace

from schemas.errors import (
    BrokerUnavailable,
    Cancelled,
    DeadlineExceeded,
    LeaseError,
    NotReady,
    RecordTooLarge,
    SystemFault,
    TooManyRequests,
    TriviumError,
)
from schemas.records import Answer, AnswerPart, CancelReason, Endpoint
from schemas.rules.trace import trace_of
from schemas.topics import DEAD_LETTER_SUFFIX
from streams.anthropic.chat import limited
from streams.anthropic.message import whole_message
from streams.bridge.answers import AnswerParts
from streams.bridge.dead_letters import dead_letter
from streams.bridge.limits import LOOK_S
from streams.bridge.pending_prompt import PendingPrompt
from streams.bridge.prompts import PromptQuestion
from streams.bridge.records.record import PromptRecord
from streams.bridge.turns.lines import BatchLines
from streams.bridge.turns.slots import Slots
from streams.calls.embedding import EmbeddingsBody, embed_texts, vectors_body
from streams.calls.ids import RESPONSE_PREFIX, Conversation, derive_ids
from streams.calls.process import CallProcess
from streams.calls.request.body import ChatBody, CompletionBody
from streams.calls.request.intake import CallIntake, take_in_body
from streams.calls.request.served import ModelCard
from streams.calls.requests import CallOptions, Inquiry, requests_of
from streams.calls.stream.answers import call_error
from streams.calls.stream.chunks import whole_answer
from streams.calls.stream.event_id import StreamKey
from streams.calls.stream.hub import Call
from streams.log.clock import wall_ms
from streams.log.retry import Backoff
from streams.log.transactions import OutgoingRecord
from streams.openai.objects.table import ObjectTable
from streams.openai.responses.call import ResponseCall
from streams.openai.responses.form import Form, whole_of

log = logging.getLogger(__name__)
VECTORS_AT_ONCE = 16  # embedding calls of one bridge at once
MaySend = Callable[[int], Awaitable[None]]  # waits until a request with tokens there may be sent


class Submitter:
    """Submits the prompts of all partitions of one bridge to the routers."""

    def __init__(
        self, process: CallProcess, table: Callable[[], ObjectTable], cluster: str
    ) -> None:
        """Create one; `cluster` distinguishes deployments that read the same topics."""
        self.process, self.calls = process, process.calls
        self._cluster = cluster
        self.partitions: Mapping[str, int] = {}  # partition counts by topic
        self.lines = BatchLines(cluster + "batch.prompts", table)
        self._sending: set[asyncio.Future[None]] = set()
        self.vector_slots = Slots(lambda: VECTORS_AT_ONCE)  # embedding workers grant no credits

    def begin(self, prompt: PendingPrompt, read_apart: Container[int] = ()) -> Call:
        """Begin the next try, and receive its tokens from now on. Raises BrokerUnavailable.

        `read_apart` are partitions of `tokens` that the caller reads for it. If the bridge's own
        partition is one of them, only the caller passes its rows: two readers are at different
        offsets, and the meaning of rows depends on their order.
        """
        question, calls = prompt.question, self.calls
        assert question is not None and not isinstance(question.body, EmbeddingsBody)
        partition, offset = self.process.member.tokens_position()
        prompt.starts.setdefault(partition, offset)
        prompt.asked_ms = prompt.asked_ms or wall_ms()
        prompt.tries += 1
        is_chat = isinstance(question.body, ChatBody)
        request_id, _ = self._ids(prompt.record, prompt.tries)
        key = StreamKey(
            parent_id=request_id,
            session_id=question.session_id or self._ids(prompt.record, 1)[1],
            model=self.model_of(prompt).name,
            endpoint=Endpoint.CHAT if is_chat else Endpoint.COMPLETION,
            partition=partition,
            offset=offset,
            created_s=prompt.asked_ms // 1000,
            deadline_ms=prompt.asked_ms + question.deadline_ms,
            choices=1,
            tenant=self.lines.tenant(prompt.record),
        )
        prompt.call = call = Call(
            key,
            deadline_ms=key.deadline_ms,
            arrived_s=asyncio.get_running_loop().time(),
            waits_for_end=True,
            tolerates_difference=calls.tolerates_difference,
        )
        call.add(request_id, 0)
        calls.hold(call, in_hub=partition not in read_apart)
        return call

    def model_of(self, prompt: PendingPrompt) -> ModelCard:
        """Return the model or adapter that a prompt names. If it is unknown, the default is
        returned, and `outcome` will have the error."""
        body = prompt.question and prompt.question.body
        return self.calls.models.find_or_default(body.model if body else None)

    def _ids(self, record: PromptRecord, tries: int) -> tuple[str, str]:
        place = f"{self._cluster}\0{record.topic}\0{record.partition}\0{record.offset}\0{tries}"
        rest = hashlib.blake2b(place.encode(), digest_size=10).digest()
        return derive_ids(max(0, record.timestamp_ms), rest)

    def has_output(self, prompt: PendingPrompt) -> bool:
        """Return whether the current try has produced any output."""
        return prompt.call is not None and prompt.call.streams[0].has_frames

    def release(self, prompt: PendingPrompt) -> None:
        """Stop receiving the tokens of the current try."""
        if prompt.call is not None:
            self.calls.release(prompt.call)
            prompt.call = None

    async def outcome(self, prompt: PendingPrompt) -> Answer | TriviumError | None:
        """Return the answer or error of the current try; None while it is running."""
        call, question = prompt.call, prompt.question
        assert call is not None and question is not None
        if (error := call_error(call)) is not None:
            return error
        if call.open_streams:
            return None
        began_s = asyncio.get_running_loop().time() - call.first_token_s
        now_ms = wall_ms()
        try:
            answer = await prompt.pair_io.answers.answer(
                prompt.record,
                question,
                call.key,
                call.streams[0],
                asked_ms=prompt.asked_ms,
                first_token_ms=now_ms - round(1000 * began_s) if call.first_token_s else 0,
                ended_ms=now_ms,
                tries=prompt.tries,
            )
            if question.message is not None:
                body, _ = whole_message(call, self.model_of(prompt).max_model_len)
                return replace(answer, body=body.decode())
            if question.response is None:
                return await self._with_echo(prompt, answer, call)
            return replace(answer, body=await self._response(prompt, question.response, call))
        except TriviumError as error:
            return error

    async def _response(self, prompt: PendingPrompt, response: ResponseCall, call: Call) -> str:
        """Return the answer's body as /v1/responses would return it."""
        record = response.record(await self._intake(prompt), call.key)
        name = RESPONSE_PREFIX + record.request_id  # the record is not stored
        return whole_of(Form(name, record), call).decode()

    async def _with_echo(self, prompt: PendingPrompt, answer: Answer, call: Call) -> Answer:
        """Return the answer; its body repeats the prompt if that asks for it. The bridge that sent
        the prompt may have been another one."""
        body = prompt.question and prompt.question.body
        if answer.body is None or not isinstance(body, CompletionBody) or not body.echo:
            return answer
        echoes = (await self._intake(prompt)).echoes
        return replace(answer, body=whole_answer(call.key, call.streams, echoes=echoes).decode())

    async def _intake(self, prompt: PendingPrompt) -> CallIntake:
        """Return the prompt's call, checked and tokenized."""
        calls, question = self.calls, prompt.question
        assert question is not None and not isinstance(question.body, EmbeddingsBody)
        if prompt.intake is not None:
            return prompt.intake
        pauses, until_ms = Backoff(), prompt.asked_ms + question.deadline_ms
        while True:
            try:
                owner, models = self.lines.owner(prompt.record), calls.models
                if question.response is not None:
                    intake = await question.response.take_in(models, calls.settings, owner)
                else:
                    intake = await take_in_body(question.body, models, calls.settings, owner)
                if question.message is not None:
                    intake = limited(intake, question.message)
                break
            except TooManyRequests:  # the process is checking others; this does not count as a try
                if wall_ms() >= until_ms:
                    raise
            await asyncio.sleep(pauses.after(0))
        if question.response is not None:
            prompt.intake = intake
        return intake

    async def check(self, prompt: PendingPrompt) -> None:
        """Check and tokenize the prompt, to find out whether that crashes the bridge."""
        if prompt.question is not None and not prompt.wants_vectors:
            with suppress(TriviumError):
                await self._intake(prompt)

    def should_retry(self, prompt: PendingPrompt, error: TriviumError) -> bool:
        """Return whether another try may succeed before the deadline and within `tries_max`."""
        question, pair = prompt.question, prompt.pair_io.pair
        if question is None or not (error.retriable or isinstance(error, Cancelled)):
            return False
        is_late = prompt.asked_ms and wall_ms() >= prompt.asked_ms + question.deadline_ms
        return prompt.tries < pair.tries_max and not is_late

    async def settle(self, prompt: PendingPrompt, may_send: MaySend) -> list[OutgoingRecord]:
        """Try until there are records to commit, and return them.

        Raises LeaseError if this bridge must not send requests any more.
        """
        pauses = Backoff()
        while True:
            if self.lines.is_given_up(prompt.record):
                return self.error_records(prompt, Cancelled("its batch was given up"))[:1]
            error = await self._try(prompt, may_send)
            if isinstance(error, list):
                return error
            if not self.should_retry(prompt, error):
                if prompt.pair_io.pair.parts and prompt.call is not None:
                    parts = AnswerParts(prompt.record, prompt.call.streams[0])
                    await self._write_part(prompt, parts.error_part())
                return self.error_records(prompt, error)
            log.info("%s@%d: %s; asked again", prompt.record.topic, prompt.record.offset, error)
            self.release(prompt)
            await asyncio.sleep(pauses.after(0))

    async def _try(
        self, prompt: PendingPrompt, may_send: MaySend
    ) -> list[OutgoingRecord] | TriviumError:
        question = prompt.question
        try:
            if question is not None and isinstance(question.body, EmbeddingsBody):
                return [await self._embed(prompt, question, question.body)]
            call = prompt.call or self.begin(prompt)
            if (outcome := await self.outcome(prompt)) is None:
                await self._send(prompt, call, may_send)
                await (
                    self._write_parts(prompt, call)
                    if prompt.pair_io.pair.parts
                    else call.wait_for_end()
                )
                outcome = await self.outcome(prompt)
                if call.failure is not None:  # the routers do not know that it failed here
                    self.calls.cancel_later(call, CancelReason.CLIENT_GONE)
            assert outcome is not None
            if isinstance(outcome, TriviumError):
                return outcome
            return [await self._fitting_answer(prompt, outcome)]
        except LeaseError:
            raise
        except TriviumError as error:
            return error
        except Exception as error:  # one faulty prompt must not stop the others
            log.exception("%s@%d", prompt.record.topic, prompt.record.offset)
            return SystemFault(f"not answered: {type(error).__name__}: {error}")

    async def _fitting_answer(self, prompt: PendingPrompt, answer: Answer) -> OutgoingRecord:
        """Return the record of an answer; raises RecordTooLarge if it exceeds its topic's limit,
        which is queried again first.
        """
        pair_io = prompt.pair_io
        try:
            return pair_io.answers.sending(prompt.record, answer)
        except RecordTooLarge:
            await pair_io.limits.refresh(LOOK_S)
            return pair_io.answers.sending(prompt.record, answer)

    async def _embed(
        self, prompt: PendingPrompt, question: PromptQuestion, body: EmbeddingsBody
    ) -> OutgoingRecord:
        """Answer an embeddings call by the pool; a repetition after a takeover is harmless."""
        prompt.asked_ms = prompt.asked_ms or wall_ms()
        try:
            deadline_ms = prompt.asked_ms + question.deadline_ms
            tenant = self.lines.owner(prompt.record)
            embeddings = await embed_texts(self.process.pool, body, deadline_ms, tenant)
        except (BrokerUnavailable, NotReady):
            raise  # the pool is unavailable; this does not count as a try
        except TriviumError:
            prompt.tries += 1
            raise
        prompt.tries += 1
        whole = vectors_body(embeddings, body)
        answers, times = (
            prompt.pair_io.answers,
            {"asked_ms": prompt.asked_ms, "tries": prompt.tries},
        )
        answer = answers.embeddings_answer(prompt.record, question, embeddings, whole, **times)
        return await self._fitting_answer(prompt, answer)

    async def _send(self, prompt: PendingPrompt, call: Call, may_send: MaySend) -> None:
        question, key = prompt.question, call.key
        assert question is not None
        intake = await self._intake(prompt)
        turn = sum(message["role"] == "assistant" for message in intake.chat.messages)
        options = CallOptions(
            priority=question.priority,
            deadline_ms=key.deadline_ms,
            w_ttft=-1.0,
            w_tpot=-1.0,
            policy=intake.policy or "",
            orchestration=intake.orchestration or "",
            keeps_running=True,
        )
        conversation = Conversation(session_id=key.session_id, turn=turn)
        inquiry = Inquiry(intake=intake, options=options, conversation=conversation)
        (request,) = requests_of(self.calls, inquiry, key, wall_ms())
        pauses = Backoff()
        while True:
            try:
                await may_send(key.partition)
                headers = trace_of(prompt.record.headers)
                sending = asyncio.ensure_future(self.process.sender.send(request, headers))
                self._sending.add(sending)
                sending.add_done_callback(self._sending.discard)
                await sending
                return
            except (BrokerUnavailable, NotReady) as error:
                if wall_ms() >= key.deadline_ms:
                    raise DeadlineExceeded(f"not asked in time: {error.message}") from error
            await asyncio.sleep(pauses.after(0))

    async def _write_parts(self, prompt: PendingPrompt, call: Call) -> None:
        """Write the answer as it arrives, until its end; after a restart, write it again from 0."""
        (stream,) = call.streams
        parts = AnswerParts(prompt.record, stream)
        call.waits_for_end = False
        while call_error(call) is None:
            if (part := parts.next_part()) is not None:
                await self._write_part(prompt, part)
                if part.finish_reason:
                    return
            else:
                await call.next_change()

    async def _write_part(self, prompt: PendingPrompt, part: AnswerPart) -> None:
        record = prompt.record
        try:
            sending = self.fitting(prompt.pair_io.answers.part(record, part))
            ack = await self.process.sender.producer.send_raw(
                sending.topic,
                sending.value,
                key=sending.key,
                partition=sending.partition,
                headers=sending.headers,
            )
            ack.add_done_callback(lambda future: future.cancelled() or future.exception())
        except TriviumError as error:  # not fatal: the answer has all of it
            log.warning("%s@%d: a part is not told: %s", record.topic, record.offset, error)

    def fitting(self, sending: OutgoingRecord) -> OutgoingRecord:
        """Return the record on a partition that exists: answers may have fewer than prompts."""
        count = self.partitions.get(sending.topic, 1)
        return replace(sending, partition=sending.partition % count)

    async def wait_until_sent(self) -> None:
        """Wait until all requests in flight to the log are acknowledged or have failed."""
        if self._sending:
            await asyncio.wait(self._sending)

    def error_records(
        self, prompt: PendingPrompt, error: TriviumError, *, steps: int = 0
    ) -> list[OutgoingRecord]:
        """Return the error answer and the dead letter; with `steps` above 0, smaller ones, because
        a topic has refused larger records.
        """
        call, prompt.error = prompt.call, error
        end = call.failed_end if call is not None else None
        request_id = call.key.parent_id if call is not None else ""
        answer = prompt.pair_io.answers.error_answer(
            prompt.record,
            error,
            question=prompt.question,
            request_id=request_id,
            asked_ms=prompt.asked_ms,
            ended_ms=wall_ms(),
            tries=prompt.tries,
        )
        letter = dead_letter(
            prompt.record,
            error,
            attempts=prompt.tries,
            worker=(end.decode_worker or end.prefill_worker) if end is not None else "",
            reason=end.kind.value if end is not None else "",
            request_id=request_id,
            bytes_max=0
            if steps
            else prompt.pair_io.limits.of(prompt.record.topic + DEAD_LETTER_SUFFIX),
        )
        return [prompt.pair_io.answers.sending(prompt.record, answer, steps=steps), letter]
