"""The gateway's state, and what its endpoints share: admission, cancellation and timeouts of calls.

There is one `Gateway` per process. `Gateway.sweep` runs a few times per second. It ends calls that
are late or lack tokens.
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
from schemas.records import (
    Cancellation,
    CancelReason,
    MemberKind,
    Registration,
    Resumption,
    TokenFrame,
)
from streams.calls.config import GatewaySettings
from streams.calls.fair_share import FairShare
from streams.calls.ids import Conversation, Conversations, ConversationTurn
from streams.calls.log.pool import RetrievalPool
from streams.calls.metrics import Metrics
from streams.calls.request.intake import ServedModel
from streams.calls.stream.event_id import EventIds
from streams.calls.stream.hub import Call, Hub
from streams.calls.stream.timeouts import failure_of
from streams.gateway.http.entry import Keys
from streams.gateway.http.exchange import BodyReader
from streams.gateway.http.uploads import Uploads
from streams.gateway.log.backend import ToRouter
from streams.log.clients import Headers
from streams.log.clock import wall_ms
from streams.openai.cache.answers import AnswerCache
from streams.openai.objects.log import Objects
from streams.openai.responses.log import ResponseStore
from streams.openai.responses.response_id import ResponseIds

logger = logging.getLogger(__name__)
SWEEP_S = 0.25
RETRY_S = 1.0
ADMIT_S = 0.05  # between two checks whether the log is back


class Backend(Protocol):
    """The source of tokens and the target of requests: the log (`log/backend.py`), or a fake in
    tests."""

    @property
    def responses(self) -> ResponseStore:
        """Return the store of the calls of /v1/responses."""

    def reply_position(self) -> tuple[int, int]:
        """Return the partition and offset at which the tokens of a request sent now will begin.

        Raises BrokerUnavailable or NotReady if no request can be accepted.
        """

    async def send(self, record: ToRouter, headers: Headers = ()) -> None:
        """Send a record and wait for the broker's acknowledgement; raises BrokerUnavailable,
        RecordTooLarge."""

    def publish_turn(self, turn: ConversationTurn) -> None:
        """Publish a turn to all gateways soon; a failure is only logged."""

    def problems(self) -> list[str]:
        """Return the reasons why this gateway is not ready; empty if it is."""

    def living(self, kind: MemberKind) -> list[Member]:
        """Return the members of one kind that are alive; none while the log is away."""

    def servers(self) -> list[Registration]:
        """Return the routers, and the workers that serve the model, including silent ones that may
        be back."""

    def read_frames(
        self, partition: int, offset: int, *, live: bool = True
    ) -> AsyncGenerator[TokenFrame]:
        """Yield the frames of any gateway's partition from an offset on.

        Reads to the present end of the partition, or without end if `live`. Raises NotFound if the
        log no longer has the offset.
        """


class Gateway:
    """The state of a gateway that outlives its calls."""

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
        # Without a key in the settings, no other gateway can resume the streams of this one.
        event_key = settings.event_key or secrets.token_hex()
        self.event_ids = EventIds(event_key, choices_max=settings.choices_max)
        self.response_ids = ResponseIds(event_key)
        self.conversations = Conversations(
            entries_max=settings.sessions_max, idle_ms=settings.session_idle_ms
        )
        self.tolerates_difference = settings.on_difference == "mark"
        self.calls: dict[Call, None] = {}  # calls in flight here, the oldest first
        self._answer_share = FairShare(settings.in_flight_max, tenants=tenants)
        self.detached = 0  # choices in flight whose client left, but whose work continues
        self.resumed_calls: set[Call] = (
            set()
        )  # calls accepted by any gateway whose stream is resumed here
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._background: set[asyncio.Task[None]] = set()
        metrics.in_flight = lambda: self.in_flight

    @property
    def in_flight(self) -> int:
        """Return the number of choices that are in flight."""
        return self._answer_share.used

    async def admit(self, tenant: str, choices: int = 1) -> None:
        """Wait until one more call can be sent, for at most `gateway.wait_ms`.

        Raises NotReady if the gateway drains, and TooManyRequests at the limit, both at once.
        Raises BrokerUnavailable or NotReady after the wait if the log or the workers are still
        away. A broker that was killed is back in seconds. A client that retries twice would have
        given up by then if each try were refused at once.
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
        """Raise TooManyRequests if one more resume exceeds the limit of this request, or that of
        all."""
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
        """Return whether the client of a call has resumed it here on another connection."""
        return any(peer.key.parent_id == call.key.parent_id for peer in self.resumed_calls)

    def find_call(self, parent_id: str, tenant: str) -> Call | None:
        """Return the call that this gateway answers; None if it is unknown or another tenant's."""
        call = self.hub.find(parent_id)
        return call if call is not None and call.key.tenant == tenant else None

    def remember(self, conversation: Conversation, answer: str) -> None:
        """Remember an answer, so that the conversation's next turn finds its session on any
        gateway."""
        turn = self.conversations.remember(conversation, answer, wall_ms())
        if turn is not None:
            self.backend.publish_turn(turn)

    def problems(self) -> list[str]:
        """Return the reasons for which /health/ready answers 503."""
        return ["shutting down"] if self.draining else self.backend.problems()

    def hold(self, call: Call, *, in_hub: bool = True) -> None:
        """Register and count a call. The hub delivers its frames if `in_hub`; otherwise the caller
        does."""
        if in_hub:
            self.hub.add(call)
        self.calls[call] = None
        self._answer_share.add(call.key.tenant, call.key.choices)
        self._idle.clear()

    def release(self, call: Call) -> None:
        """Remove a call that is over."""
        self.hub.remove(call)
        del self.calls[call]
        self._answer_share.give_back(call.key.tenant, call.key.choices)
        self._set_idle()

    def _set_idle(self) -> None:
        if self.in_flight == self.detached:
            self._idle.set()

    def detach(self, call: Call) -> None:
        """Let the work of a call without a client continue, and count the call until it ends."""
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
        """Cancel every choice of a call that has not ended; log an unavailable broker."""
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
        """Write to routers that this gateway reads the answer, too; retry until the broker
        acknowledges it."""
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
        """Cancel a call in the background."""
        self.run_in_background(self.cancel(call, reason))

    def run_in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def sweep(self, now_s: float, now_ms: int) -> None:
        """End calls that are late or lack tokens, and have a keep-alive comment sent on silent
        streams."""
        for call in [*self.calls, *self.resumed_calls]:
            failure = failure_of(call, now_s, now_ms, self.settings.gap_ms)
            if failure is not None:
                is_late = isinstance(failure, DeadlineExceeded)
                if is_late and call.failure is not None:  # its client does not read the error
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
        """Call `sweep` every `SWEEP_S` seconds until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self.sweep(loop.time(), wall_ms())
            await asyncio.sleep(SWEEP_S)

    async def wait_until_idle(self, grace_ms: int) -> None:
        """Wait until no client waits for an answer, for at most `grace_ms` milliseconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_ms / 1000):
                await self._idle.wait()
