"""The calls in flight in this process: how many are admitted, and how they end.

`CallsInFlight.sweep` runs a few times per second. It ends calls that are late or lack tokens.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Final, Protocol

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
    Request,
    Resumption,
    TokenFrame,
)
from streams.calls.config import GatewaySettings
from streams.calls.log.sender import ToRouter
from streams.calls.metrics import Metrics
from streams.calls.request.served import ModelCard, ServedModels
from streams.calls.stream.hub import Call, Hub, failure_of
from streams.log.clients import Headers
from streams.log.clock import wall_ms

logger = logging.getLogger(__name__)
SWEEP_S = 0.25
RETRY_S = 1.0
RESUMES_MAX: Final = 64  # streams resumed at once; each has a consumer of its own
RESUMES_PER_REQUEST_MAX: Final = 4  # the id of one caller takes no more of these
ADMIT_S = 0.05  # between two checks whether the log is back


class CallFleet(Protocol):
    """The fleet as a process sees it that sends calls (`log/member.py`)."""

    def reply_position(self, model: str = "", adapter: str = "") -> tuple[int, int]:
        """Return the partition and offset at which the tokens of a request sent now will begin.

        Raises BrokerUnavailable, or NotReady if no worker is ready that serves the model with the
        adapter; without a model, if none is ready for any model.
        """

    def problems(self) -> list[str]:
        """Return the reasons why no call can be answered; empty if some can."""

    def unserved(self) -> list[str]:
        """Return a reason for each model whose calls cannot be answered, if others' can."""

    def living(self, kind: MemberKind) -> list[Member]:
        """Return the members of one kind that are alive; none while the log is away."""

    def servers(self, model: str) -> list[Registration]:
        """Return the routers, and the workers that serve the model, including silent ones that may
        be back."""


class RequestLog(Protocol):
    """The target of requests (`streams/calls/log/sender.py`)."""

    async def send(self, record: ToRouter, headers: Headers = ()) -> None:
        """Send a record and wait for the broker's acknowledgement; raises BrokerUnavailable,
        RecordTooLarge."""


class TokenLog(Protocol):
    """The source of tokens that were written before (`log/tokens.py`)."""

    def read_again(
        self, partition: int, offset: int, *, live: bool = True
    ) -> AsyncGenerator[TokenFrame]:
        """Yield the frames of any gateway's partition from an offset on.

        Reads to the present end of the partition, or without end if `live`. Raises NotFound if the
        log no longer has the offset.
        """


class FairShare:
    """A limit on things in use at once, divided by the number of tenants that use some now, plus
    one.

    The last quarter is for tenants that use few: each gets at most half of what the others leave,
    so that a new tenant always finds some.
    """

    def __init__(self, limit: int, *, tenants: int) -> None:
        """Set the limit; `tenants` is the number of tenants in the deployment."""
        self._limit, self._is_shared = limit, tenants > 1
        self._for_newcomers = max(1, limit // 4) if self._is_shared else 0
        self._used: Counter[str] = Counter()

    @property
    def used(self) -> int:
        """Return the number in use by all tenants together."""
        return self._used.total()

    def limit_of(self, tenant: str) -> int:
        """Return how many a tenant may use now."""
        if not self._is_shared:
            return self._limit
        other_tenants = len(self._used) - (tenant in self._used)
        return max(1, self._limit // (other_tenants + 2))

    def check(self, tenant: str, what: str, count: int = 1) -> None:
        """Raise TooManyRequests if a tenant cannot use `count` more; `what` names them in the
        message."""
        tenant_used, tenant_limit = self._used.get(tenant, 0), self.limit_of(tenant)
        has_few = tenant_used + count <= max(1, (self._limit - self.used + tenant_used) // 2)
        together = self._limit if has_few else self._limit - self._for_newcomers
        if tenant_used + count > tenant_limit or self.used + count > together:
            raise TooManyRequests(
                f"{tenant_used} of your {what} and {self.used - tenant_used} of others are under "
                f"way, and at most {tenant_limit} and {self._limit} together may be; try again "
                "later"
            )

    def take(self, tenant: str, what: str, count: int = 1) -> None:
        """Check the limits, then count `count` more as used."""
        self.check(tenant, what, count)
        self.add(tenant, count)

    def add(self, tenant: str, count: int = 1) -> None:
        """Count `count` more as used without a check."""
        self._used[tenant] += count

    def give_back(self, tenant: str, count: int = 1) -> None:
        """Count `count` fewer as used by a tenant."""
        self._used[tenant] -= count
        if not self._used[tenant]:
            del self._used[tenant]


class CallsInFlight:
    """Admits calls, counts them until they end, and ends what nobody else ends."""

    def __init__(
        self,
        settings: GatewaySettings,
        models: ServedModels,
        hub: Hub,
        metrics: Metrics,
        *,
        fleet: CallFleet,
        log: RequestLog,
        process_id: str,
        started_ms: int,
    ) -> None:
        """Set up the calls of a process; routers know it by `process_id` and `started_ms`."""
        self.settings, self.models = settings, models
        self.hub, self.fleet, self.log = hub, fleet, log
        self.process_id, self.started_ms = process_id, started_ms
        self.resumed: set[Call] = set()  # accepted by any gateway; their streams are resumed here
        self.detached = 0  # choices in flight whose client left, but whose work continues
        self.draining = False
        self._calls: dict[Call, None] = {}  # the oldest first
        self._share = FairShare(settings.in_flight_max, tenants=settings.tenants)
        self._idle = asyncio.Event()
        self._idle.set()
        self._background: set[asyncio.Task[None]] = set()
        metrics.in_flight = lambda: self.in_flight

    @property
    def in_flight(self) -> int:
        """Return the number of choices that are in flight."""
        return self._share.used

    @property
    def tolerates_difference(self) -> bool:
        """Return whether an answer goes on after tokens that an attempt repeated differently."""
        return self.settings.on_difference == "mark"

    def problems(self) -> list[str]:
        """Return the reasons for which /health/ready answers 503."""
        return ["shutting down"] if self.draining else self.fleet.problems()

    def unserved(self) -> list[str]:
        """Return a reason for each model whose calls cannot be answered, if others' can."""
        return self.fleet.unserved()

    async def admit(self, tenant: str, choices: int = 1, card: ModelCard | None = None) -> None:
        """Wait until one more call can be sent, to any model or to that of a card, for at most
        `gateway.wait_ms`.

        Raises NotReady if the gateway drains, and TooManyRequests at the limit, both at once.
        Raises BrokerUnavailable or NotReady after the wait if the log or the workers are still
        away. A broker that was killed is back in seconds. A client that retries twice would have
        given up by then if each try were refused at once.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self.settings.wait_ms / 1000
        while True:
            try:
                return self._check_admission(tenant, choices, card)
            except (BrokerUnavailable, NotReady):
                if self.draining or loop.time() >= until_s:
                    raise
            await asyncio.sleep(ADMIT_S)

    def _check_admission(self, tenant: str, choices: int, card: ModelCard | None) -> None:
        if self.draining:
            raise NotReady("this gateway is shutting down; try again")
        self._share.check(tenant, "answers", choices)
        if card is None:
            self.fleet.reply_position()
        else:
            self.fleet.reply_position(card.model, card.adapter)

    def admit_resume(self, parent_id: str, tenant: str) -> None:
        """Raise TooManyRequests if one more resume exceeds the limit of this request, or that of
        all."""
        same = sum(call.key.parent_id == parent_id for call in self.resumed)
        if same >= RESUMES_PER_REQUEST_MAX:
            raise TooManyRequests(
                f"{same} times this stream is being resumed, and at most {RESUMES_PER_REQUEST_MAX} "
                "are allowed; try again later"
            )
        share = FairShare(RESUMES_MAX, tenants=self.settings.tenants)
        for call in self.resumed:
            share.add(call.key.tenant)
        share.check(tenant, "resumed streams")

    def is_resumed(self, call: Call) -> bool:
        """Return whether the client of a call has resumed it here on another connection."""
        return any(peer.key.parent_id == call.key.parent_id for peer in self.resumed)

    def find_call(self, parent_id: str, tenant: str) -> Call | None:
        """Return the call that this gateway answers; None if it is unknown or another tenant's."""
        call = self.hub.find(parent_id)
        return call if call is not None and call.key.tenant == tenant else None

    async def send(self, requests: Sequence[Request], headers: Headers) -> None:
        """Send the requests of a call, and wait until the broker has acknowledged them all."""
        if len(requests) == 1:
            await self.log.send(requests[0], headers)
        else:
            await asyncio.gather(*(self.log.send(request, headers) for request in requests))

    def hold(self, call: Call, *, in_hub: bool = True) -> None:
        """Register and count a call. The hub delivers its frames if `in_hub`; otherwise the caller
        does."""
        if in_hub:
            self.hub.add(call)
        self._calls[call] = None
        self._share.add(call.key.tenant, call.key.choices)
        self._idle.clear()

    def release(self, call: Call) -> None:
        """Remove a call that is over."""
        self.hub.remove(call)
        del self._calls[call]
        self._share.give_back(call.key.tenant, call.key.choices)
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

    def give_up(self, call: Call) -> None:
        """Remove a call that has no reader any more, and cancel its requests."""
        self.release(call)
        self.cancel_later(call, CancelReason.CLIENT_GONE)

    async def cancel_whole_answers(self) -> None:
        """Cancel the calls whose answers are sent whole: no client can resume them elsewhere."""
        for call in list(self._calls):
            if call.waits_for_end and not call.client_gone:
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
                await self.log.send(record)
            except BrokerUnavailable as error:
                logger.warning("%s: not cancelled: %s", stream.request_id, error.message)

    async def announce_reader(self, call: Call) -> None:
        """Write to routers that this gateway reads the answer, too; retry until the broker
        acknowledges it."""
        for stream in call.streams:
            record = Resumption(
                request_id=stream.request_id,
                session_id=call.key.session_id,
                gateway_id=self.process_id,
                gateway_started_ms=self.started_ms,
                at_ms=wall_ms(),
            )
            while True:
                try:
                    await self.log.send(record)
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
        for call in [*self._calls, *self.resumed]:
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
