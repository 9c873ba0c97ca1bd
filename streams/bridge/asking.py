"""A prompt at the routers: asked until it has an answer, or an error that stands.

Ids of requests follow from where the prompt lies, so whoever asks it again asks the same: routers
drop what they know. A request does not end with its bridge, and its tokens stay in the log.
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
from schemas.log.clock import wall_ms
from schemas.log.patience import Backoff
from schemas.log.transactions import OutgoingRecord
from schemas.records import Answer, AnswerPart, CancelReason, Endpoint
from schemas.rules.trace import trace_of
from schemas.topics import DEAD_LETTER_SUFFIX
from streams.bridge.asked import Asked
from streams.bridge.dead_letters import dead_letter
from streams.bridge.limits import LOOK_S
from streams.bridge.prompts import Question
from streams.bridge.records.record import PromptRecord
from streams.bridge.turns.lines import BatchLines
from streams.bridge.turns.slots import Slots
from streams.gateway.endpoints.embeddings import embed_texts, vectors_body
from streams.gateway.endpoints.generate import Inquiry, requests_of
from streams.gateway.ids import derive_ids
from streams.gateway.log.backend import LogBackend
from streams.gateway.request.body import ChatBody
from streams.gateway.request.conversation import Conversation
from streams.gateway.request.embed_body import EmbeddingsBody
from streams.gateway.request.intake import CallIntake, take_in_body
from streams.gateway.request.options import CallOptions
from streams.gateway.responses.create import ResponseCall
from streams.gateway.responses.form import Form, whole_of
from streams.gateway.state import Gateway
from streams.gateway.stream.delivery import call_error
from streams.gateway.stream.event_id import StreamKey
from streams.gateway.stream.hub import Call

log = logging.getLogger(__name__)
VECTORS_AT_ONCE = 16  # calls for vectors that one bridge has under way
MaySend = Callable[[int], Awaitable[None]]  # waits until a request with tokens there may be sent


class Asking:
    """Asks for one bridge, whichever partition a prompt is of."""

    def __init__(self, gateway: Gateway, backend: LogBackend, cluster: str) -> None:
        """`cluster` tells deployments apart that read the same topics."""
        self.gateway, self.backend = gateway, backend
        self._cluster = cluster
        self.partitions: Mapping[str, int] = {}  # how many each topic has
        self.lines = BatchLines(cluster + "batch.prompts", lambda: backend.objects.table)
        self._sending: set[asyncio.Future[None]] = set()
        self.vector_slots = Slots(lambda: VECTORS_AT_ONCE)  # workers of other pools grant none

    def begin(self, asked: Asked, read_apart: Container[int] = ()) -> Call:
        """The next try: from now on its tokens are listened to. Raises BrokerUnavailable.

        `read_apart` are partitions of `tokens` that the caller reads for it. Where this bridge's
        own is one of them, it hears that one from the caller alone: two readers of a partition are
        at two places, and what its rows mean depends on their order.
        """
        question, gateway = asked.question, self.gateway
        assert question is not None and not isinstance(question.body, EmbeddingsBody)
        partition, offset = self.backend.tokens_position()
        asked.starts.setdefault(partition, offset)
        asked.asked_ms = asked.asked_ms or wall_ms()
        asked.tries += 1
        is_chat = isinstance(question.body, ChatBody)
        request_id, _ = self._ids(asked.record, asked.tries)
        key = StreamKey(
            parent_id=request_id,
            session_id=question.session_id or self._ids(asked.record, 1)[1],
            model=gateway.served.name,
            endpoint=Endpoint.CHAT if is_chat else Endpoint.COMPLETION,
            partition=partition,
            offset=offset,
            created_s=asked.asked_ms // 1000,
            deadline_ms=asked.asked_ms + question.deadline_ms,
            choices=1,
            tenant=self.lines.tenant(asked.record),
        )
        asked.call = call = Call(
            key,
            deadline_ms=key.deadline_ms,
            arrived_s=asyncio.get_running_loop().time(),
            waits_for_end=True,
            tolerates_difference=gateway.tolerates_difference,
        )
        call.add(request_id, 0)
        gateway.hold(call, in_hub=partition not in read_apart)
        return call

    def _ids(self, record: PromptRecord, tries: int) -> tuple[str, str]:
        place = f"{self._cluster}\0{record.topic}\0{record.partition}\0{record.offset}\0{tries}"
        rest = hashlib.blake2b(place.encode(), digest_size=10).digest()
        return derive_ids(max(0, record.timestamp_ms), rest)

    def is_told_of(self, asked: Asked) -> bool:
        """Whether anything of its present try has come."""
        return asked.call is not None and asked.call.streams[0].has_frames

    def release(self, asked: Asked) -> None:
        """Listen no more to its present try."""
        if asked.call is not None:
            self.gateway.release(asked.call)
            asked.call = None

    async def outcome(self, asked: Asked) -> Answer | TriviumError | None:
        """Of the present try; None while it goes on."""
        call, question = asked.call, asked.question
        assert call is not None and question is not None
        if (error := call_error(call)) is not None:
            return error
        if call.open_streams:
            return None
        began_s = asyncio.get_running_loop().time() - call.first_token_s
        now_ms = wall_ms()
        try:
            answer = await asked.ends.answers.answer(
                asked.record,
                question,
                call.key,
                call.streams[0],
                asked_ms=asked.asked_ms,
                first_token_ms=now_ms - round(1000 * began_s) if call.first_token_s else 0,
                ended_ms=now_ms,
                tries=asked.tries,
            )
            if question.response is None:
                return answer
            return replace(answer, body=await self._response(asked, question.response, call))
        except TriviumError as error:
            return error

    async def _response(self, asked: Asked, response: ResponseCall, call: Call) -> str:
        """As the endpoint has it."""
        record = response.record(await self._intake(asked), call.key)
        name = self.gateway.response_ids.name(record.request_id, record.tenant, None)
        return whole_of(Form(name, record), call).decode()

    async def _intake(self, asked: Asked) -> CallIntake:
        """What is checked and tokenised of what it asks."""
        gateway, question = self.gateway, asked.question
        assert question is not None and not isinstance(question.body, EmbeddingsBody)
        if asked.intake is not None:
            return asked.intake
        pauses, until_ms = Backoff(), asked.asked_ms + question.deadline_ms
        while True:
            try:
                owner, served = self.lines.owner(asked.record), gateway.served
                if question.response is not None:
                    intake = await question.response.take_in(served, gateway.settings, owner)
                else:
                    intake = await take_in_body(question.body, served, gateway.settings, owner)
                break
            except TooManyRequests:  # others are being checked in this process; that is no try
                if wall_ms() >= until_ms:
                    raise
            await asyncio.sleep(pauses.after(0))
        if question.response is not None:
            asked.intake = intake
        return intake

    async def check(self, asked: Asked) -> None:
        """Check and tokenise what it asks, only to see that it can be done."""
        if asked.question is not None and not asked.wants_vectors:
            with suppress(TriviumError):
                await self._intake(asked)

    def asks_again(self, asked: Asked, error: TriviumError) -> bool:
        """Whether another try may be better, and there is time for it."""
        question, pair = asked.question, asked.ends.pair
        if question is None or not (error.retriable or isinstance(error, Cancelled)):
            return False
        is_late = asked.asked_ms and wall_ms() >= asked.asked_ms + question.deadline_ms
        return asked.tries < pair.tries_max and not is_late

    async def settle(self, asked: Asked, may_send: MaySend) -> list[OutgoingRecord]:
        """Ask until there is something to commit. Raises LeaseError: this bridge is not to ask."""
        pauses = Backoff()
        while True:
            if self.lines.is_given_up(asked.record):
                return self.failed(asked, Cancelled("its batch was given up"))[:1]
            error = await self._try(asked, may_send)
            if isinstance(error, list):
                return error
            if not self.asks_again(asked, error):
                if asked.ends.pair.parts and asked.call is not None:
                    await self._part(asked, asked.call, 0, 0, "error")
                return self.failed(asked, error)
            log.info("%s@%d: %s; asked again", asked.record.topic, asked.record.offset, error)
            self.release(asked)
            await asyncio.sleep(pauses.after(0))

    async def _try(self, asked: Asked, may_send: MaySend) -> list[OutgoingRecord] | TriviumError:
        question = asked.question
        try:
            if question is not None and isinstance(question.body, EmbeddingsBody):
                return [await self._embed(asked, question, question.body)]
            call = asked.call or self.begin(asked)
            if (found := await self.outcome(asked)) is None:
                await self._send(asked, call, may_send)
                await (self._tell(asked, call) if asked.ends.pair.parts else call.wait_for_end())
                found = await self.outcome(asked)
                if call.failure is not None:  # nobody else knows that it is given up
                    self.gateway.cancel_later(call, CancelReason.CLIENT_GONE)
            assert found is not None
            if isinstance(found, TriviumError):
                return found
            return [await self._fitting_answer(asked, found)]
        except LeaseError:
            raise
        except TriviumError as error:
            return error
        except Exception as error:  # of one prompt: the others are to be answered
            log.exception("%s@%d", asked.record.topic, asked.record.offset)
            return SystemFault(f"not answered: {type(error).__name__}: {error}")

    async def _fitting_answer(self, asked: Asked, answer: Answer) -> OutgoingRecord:
        """Raises RecordTooLarge, when its topic was asked whether it takes more by now."""
        ends = asked.ends
        try:
            return ends.answers.sending(asked.record, answer)
        except RecordTooLarge:
            await ends.limits.look(LOOK_S)
            return ends.answers.sending(asked.record, answer)

    async def _embed(
        self, asked: Asked, question: Question, body: EmbeddingsBody
    ) -> OutgoingRecord:
        """Nobody but the pool knows of it, so nothing is done twice but work."""
        asked.asked_ms = asked.asked_ms or wall_ms()
        try:
            deadline_ms = asked.asked_ms + question.deadline_ms
            tenant = self.lines.owner(asked.record)
            found = await embed_texts(self.gateway.pool, body, deadline_ms, tenant)
        except (BrokerUnavailable, NotReady):
            raise  # it is waited for; that is no try
        except TriviumError:
            asked.tries += 1
            raise
        asked.tries += 1
        whole = vectors_body(found, body)
        answers, times = asked.ends.answers, {"asked_ms": asked.asked_ms, "tries": asked.tries}
        answer = answers.embedded(asked.record, question, found, whole, **times)
        return await self._fitting_answer(asked, answer)

    async def _send(self, asked: Asked, call: Call, may_send: MaySend) -> None:
        question, gateway, key = asked.question, self.gateway, call.key
        assert question is not None
        intake = await self._intake(asked)
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
        (request,) = requests_of(gateway, inquiry, key, wall_ms())
        pauses = Backoff()
        while True:
            try:
                await may_send(key.partition)
                headers = trace_of(asked.record.headers)
                sending = asyncio.ensure_future(self.backend.send(request, headers))
                self._sending.add(sending)
                sending.add_done_callback(self._sending.discard)
                await sending
                return
            except (BrokerUnavailable, NotReady) as error:
                if wall_ms() >= key.deadline_ms:
                    raise DeadlineExceeded(f"not asked in time: {error.message}") from error
            await asyncio.sleep(pauses.after(0))

    async def _tell(self, asked: Asked, call: Call) -> None:
        """Write its text as it comes, until its end; an attempt that begins anew is told anew."""
        stream, seq, start, anew = call.streams[0], 0, 0, 0
        call.waits_for_end = False
        while call_error(call) is None:
            if stream.restart_count != anew:
                seq, start, anew = 0, 0, stream.restart_count
            # Before the part is sent: more may come meanwhile.
            end, next_seq, next_char = stream.end, stream.next_seq, stream.next_char
            if end is not None or next_seq > seq:
                reason = "" if end is None else end.finish_reason or "stop"
                await self._part(asked, call, seq, start, reason)
                seq, start = next_seq, next_char
            if end is not None:
                return
            await call.next_change()

    async def _part(self, asked: Asked, call: Call, seq: int, start: int, reason: str) -> None:
        record, stream = asked.record, call.streams[0]
        is_error = reason == "error"
        part = AnswerPart(
            prompt_topic=record.topic,
            prompt_partition=record.partition,
            prompt_offset=record.offset,
            request_id=stream.request_id,
            seq=stream.next_seq if is_error else seq,
            tokens=0 if is_error else stream.next_seq - seq,
            start=stream.next_char if is_error else start,
            text="" if is_error else "".join(stream.texts)[start:],
            finish_reason=reason,
        )
        try:
            sending = self.fitting(asked.ends.answers.part(record, part))
            ack = await self.backend.producer.send_raw(
                sending.topic,
                sending.value,
                key=sending.key,
                partition=sending.partition,
                headers=sending.headers,
            )
            ack.add_done_callback(lambda done: done.cancelled() or done.exception())
        except TriviumError as error:  # the answer comes whole
            log.warning("%s@%d: a part is not told: %s", record.topic, record.offset, error)

    def fitting(self, sending: OutgoingRecord) -> OutgoingRecord:
        """On a partition that its topic has: of answers there may be fewer than of prompts."""
        count = self.partitions.get(sending.topic, 1)
        return replace(sending, partition=sending.partition % count)

    async def sent(self) -> None:
        """Wait until what is being sent is acknowledged, or given up."""
        if self._sending:
            await asyncio.wait(self._sending)

    def failed(self, asked: Asked, error: TriviumError, *, less: int = 0) -> list[OutgoingRecord]:
        """The answer that tells of an error, and the dead letter; both smaller by so many steps
        where topics have refused more.
        """
        call, asked.error = asked.call, error
        end = call.failed_end if call is not None else None
        request_id = call.key.parent_id if call is not None else ""
        answer = asked.ends.answers.failed(
            asked.record,
            error,
            question=asked.question,
            request_id=request_id,
            asked_ms=asked.asked_ms,
            ended_ms=wall_ms(),
            tries=asked.tries,
        )
        letter = dead_letter(
            asked.record,
            error,
            attempts=asked.tries,
            worker=(end.decode_worker or end.prefill_worker) if end is not None else "",
            reason=end.kind.value if end is not None else "",
            request_id=request_id,
            bytes_max=0 if less else asked.ends.limits.of(asked.record.topic + DEAD_LETTER_SUFFIX),
        )
        return [asked.ends.answers.sending(asked.record, answer, less=less), letter]
