"""The gateway's state and what its endpoints have in common: admitting, cancelling and watching
over calls.

One object per process. `sweep` is called a few times per second and ends what nobody else would
end.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Coroutine
from typing import Protocol

from schemas.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    NotReady,
    TooManyRequests,
)
from schemas.fleet import Member
from schemas.log.clients import Headers
from schemas.log.clock import wall_ms
from schemas.records import (
    Cancellation,
    CancelReason,
    MemberKind,
    Registration,
    Resumption,
    TokenFrame,
)
from streams.gateway.cache.answers import AnswerCache
from streams.gateway.config import GatewaySettings
from streams.gateway.fair_share import FairShare
from streams.gateway.http.entry import Keys
from streams.gateway.http.exchange import BodyReader
from streams.gateway.http.uploads import Uploads
from streams.gateway.log.backend import ToRouter
from streams.gateway.log.objects import Objects
from streams.gateway.log.pool import RetrievalPool
from streams.gateway.log.responses import ResponseStore
from streams.gateway.metrics import Metrics
from streams.gateway.request.conversation import Conversation, Conversations, ConversationTurn
from streams.gateway.request.intake import ServedModel
from streams.gateway.stream.event_id import EventIds
from streams.gateway.stream.hub import Call, Hub
from streams.gateway.stream.response_id import ResponseIds
from streams.gateway.stream.timeouts import failure_of

logger = logging.getLogger(__name__)
SWEEP_S = 0.25
RETRY_S = 1.0
ADMIT_S = 0.05  # between two looks whether the log is back


class Backend(Protocol):
    """Where requests go and tokens come from: the log (`log/backend.py`), or what tests have."""

    @property
    def responses(self) -> ResponseStore:
        """Where calls of /v1/responses are kept."""

    def reply_position(self) -> tuple[int, int]:
        """Partition and offset from which the tokens of a request sent now will come.

        Raises what stands in the way of accepting one: BrokerUnavailable, NotReady.
        """

    async def send(self, record: ToRouter, headers: Headers = ()) -> None:
        """Returns when the broker has acknowledged; raises BrokerUnavailable, RecordTooLarge."""

    def publish_turn(self, turn: ConversationTurn) -> None:
        """Have every gateway know it, soon; where that fails it is only logged."""

    def problems(self) -> list[str]:
        """Why this gateway is not ready; empty when it is."""

    def living(self, kind: MemberKind) -> list[Member]:
        """Members of one kind; nobody while the log is away."""

    def servers(self) -> list[Registration]:
        """Routers, and workers that serve the model: who lives, and who is only silent and may be
        back."""

    def read_frames(
        self, partition: int, offset: int, *, live: bool = True
    ) -> AsyncGenerator[TokenFrame]:
        """Frames of any gateway's partition from an offset on: to the present end, or live, without
        end. Raises NotFound where the log has that offset no more.
        """


class Gateway:
    """Everything that outlives a call."""

    def __init__(
        self,
        settings: GatewaySettings,
        served: ServedModel,
        backend: Backend,
        hub: Hub,
        metrics: Metrics,
        pool: RetrievalPool,
        objects: Objects,
        *,
        gateway_id: str,
        started_ms: int,
    ) -> None:
        self.settings = settings
        self.served = served
        self.backend = backend
        self.hub = hub
        self.metrics = metrics
        self.pool = pool
        self.objects = objects
        tenants = settings.tenants
        self.uploads = Uploads(
            bytes_max=settings.file_bytes_max,
            share=FairShare(settings.uploads_max, tenants=tenants),
        )
        self.gateway_id = gateway_id
        self.started_ms = started_ms
        self.answers = AnswerCache(settings, pool, metrics)
        self.keys = Keys(settings.api_keys)
        self.body_reader = BodyReader(
            bytes_max=settings.body_bytes_max,
            share=FairShare(settings.bodies_bytes_max, tenants=tenants),
        )
        # Without a key nobody else resumes what is streamed here.
        event_key = settings.event_key or secrets.token_hex()
        self.event_ids = EventIds(event_key, choices_max=settings.choices_max)
        self.response_ids = ResponseIds(event_key)
        self.conversations = Conversations(
            entries_max=settings.sessions_max, idle_ms=settings.session_idle_ms
        )
        self.tolerates_difference = settings.on_difference == "mark"
        self.calls: dict[Call, None] = {}  # that are answered here, the oldest first
        self._answer_share = FairShare(settings.in_flight_max, tenants=tenants)
        self.detached = 0  # of these, choices whose client left and let the work go on
        self.resumed_calls: set[Call] = (
            set()
        )  # calls that began at any gateway, and are read on here
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._background: set[asyncio.Task[None]] = set()
        metrics.in_flight = lambda: self.in_flight

    @property
    def in_flight(self) -> int:
        """Choices that are being answered."""
        return self._answer_share.used

    async def admit(self, tenant: str, choices: int = 1) -> None:
        """Wait until one more call can be sent. Raises what stands in the way: draining and the
        limit at once, a log that is away, or workers, after `gateway.wait_ms`.

        A broker that is killed is back in seconds. Clients who try again twice have given up by
        then, if each try is refused at once.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self.settings.wait_ms / 1000
        while True:
            try:
                return self._check_admission(tenant, choices)
            except (BrokerUnavailable, NotReady):
                if self.draining or loop.time() >= until_s:
                    raise
            await asyncio.sleep(ADMIT_S)

    def _check_admission(self, tenant: str, choices: int) -> None:
        if self.draining:
            raise NotReady("this gateway is shutting down; try again")
        self._answer_share.check(tenant, "answers", choices)
        self.backend.reply_position()

    def admit_resume(self, parent_id: str, tenant: str) -> None:
        """Raise TooManyRequests where one more resume of this request, or of any, is too many."""
        same = sum(call.key.parent_id == parent_id for call in self.resumed_calls)
        if same >= (resumes_max := self.settings.resumes_per_request_max):
            raise TooManyRequests(
                f"{same} times this stream is being resumed, and at most {resumes_max} are "
                "allowed; try again later"
            )
        share = FairShare(self.settings.resumes_max, tenants=self.settings.tenants)
        for call in self.resumed_calls:
            share.add(call.key.tenant)
        share.check(tenant, "resumed streams")

    def is_resumed(self, call: Call) -> bool:
        """Whether its client has come back to this gateway on another connection."""
        return any(peer.key.parent_id == call.key.parent_id for peer in self.resumed_calls)

    def find_call(self, parent_id: str, tenant: str) -> Call | None:
        """The call that this gateway answers, if it is the caller's."""
        call = self.hub.find(parent_id)
        return call if call is not None and call.key.tenant == tenant else None

    def remember(self, conversation: Conversation, answer: str) -> None:
        """Let the next turn of a conversation without a session header find it, on any gateway."""
        turn = self.conversations.remember(conversation, answer, wall_ms())
        if turn is not None:
            self.backend.publish_turn(turn)

    def problems(self) -> list[str]:
        """List the reasons for which /health/ready answers 503."""
        return ["shutting down"] if self.draining else self.backend.problems()

    def hold(self, call: Call, *, in_hub: bool = True) -> None:
        """Expect frames for a call, and count it. One that does not hear what this gateway's
        partition brings is told by whoever holds it.
        """
        if in_hub:
            self.hub.add(call)
        self.calls[call] = None
        self._answer_share.add(call.key.tenant, call.key.choices)
        self._idle.clear()

    def release(self, call: Call) -> None:
        """Forget a call that is over."""
        self.hub.remove(call)
        del self.calls[call]
        self._answer_share.give_back(call.key.tenant, call.key.choices)
        self._set_idle()

    def _set_idle(self) -> None:
        if self.in_flight == self.detached:
            self._idle.set()

    def detach(self, call: Call) -> None:
        """Let the work of a client that has gone on, and count it until it ends."""
        self.run_in_background(self._wait_for_end(call))
        self.detached += call.key.choices
        self._set_idle()

    async def _wait_for_end(self, call: Call) -> None:
        try:
            await call.wait_for_end()
        finally:
            self.detached -= call.key.choices
            self.release(call)
        if call.failure is not None:
            await self.cancel(call, CancelReason.CLIENT_GONE)

    async def cancel(self, call: Call, reason: CancelReason) -> None:
        """Give up every choice that has not ended; a broker that is away is only logged."""
        now_ms = wall_ms()
        for stream in call.streams:
            if stream.end is not None:
                continue
            record = Cancellation(
                request_id=stream.request_id,
                session_id=call.key.session_id,
                reason=reason,
                at_ms=now_ms,
                tenant=call.key.tenant,
            )
            try:
                await self.backend.send(record)
            except BrokerUnavailable as error:
                logger.warning("%s: not cancelled: %s", stream.request_id, error.message)

    async def announce_reader(self, call: Call) -> None:
        """Tell routers that the answer is read here too, until they have it on the log."""
        for stream in call.streams:
            record = Resumption(
                request_id=stream.request_id,
                session_id=call.key.session_id,
                gateway_id=self.gateway_id,
                gateway_started_ms=self.started_ms,
                at_ms=wall_ms(),
            )
            while True:
                try:
                    await self.backend.send(record)
                    break
                except BrokerUnavailable as error:
                    logger.warning("%s: resumed, not told: %s", record.request_id, error.message)
                    await asyncio.sleep(RETRY_S)

    def cancel_later(self, call: Call, reason: CancelReason) -> None:
        """The same without making anybody wait."""
        self.run_in_background(self.cancel(call, reason))

    def run_in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def sweep(self, now_s: float, now_ms: int) -> None:
        """End late calls and those that lack tokens; keep silent ones alive."""
        for call in [*self.calls, *self.resumed_calls]:
            failure = failure_of(call, now_s, now_ms, self.settings.gap_ms)
            if failure is not None:
                is_late = isinstance(failure, DeadlineExceeded)
                if is_late and call.failure is not None:  # told, and here still: nobody reads it
                    call.abort_connection()
                call.fail(failure)
            elif (
                not call.waits_for_end
                and (now_s - call.last_activity_s) * 1000 > self.settings.keepalive_ms
            ):
                call.last_activity_s = now_s
                call.keepalive_due = True
                call.wake()

    async def sweep_forever(self) -> None:
        """`sweep` on the clock, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self.sweep(loop.time(), wall_ms())
            await asyncio.sleep(SWEEP_S)

    async def wait_until_idle(self, grace_ms: int) -> None:
        """Return when no client waits for an answer any more, or after the grace."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_ms / 1000):
                await self._idle.wait()
