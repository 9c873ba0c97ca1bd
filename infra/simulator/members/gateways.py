"""Gateways of a simulated cluster: they accept requests, read answers, die and start again.

The gateway's own code assembles the answers: `Hub` and `Stream` drop repeated tokens, compare them,
and detect the end of an answer. If a gateway is lost, another one reads an answer only if the
client resumes there: from the log, after the tokens that the client has.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from zlib import crc32

from infra.simulator.log.clock import Clock
from schemas.records import Continued, Request, Resumption, TokenFrame
from streams.calls.config import GatewaySettings
from streams.calls.log.answers import progress_record
from streams.calls.stream.event_id import ClientPosition, StreamKey
from streams.calls.stream.hub import AnswerProgress, Call, CallStream, Hub, failure_of

GAP_MS = GatewaySettings().gap_ms
KEEPS_RUNNING_EVERY = 5  # every fifth request keeps running if its client leaves


class SimAnswer(Call):
    """One request's answer on its way to the client; `touched` collects answers with news."""

    __slots__ = ("request", "touched")

    def __init__(
        self,
        request: Request,
        touched: dict[str, "SimAnswer"],
        offset: int,
        now_ms: float,
        position: ClientPosition | None = None,
        *,
        wants_ids: bool,
        is_whole: bool,
    ) -> None:
        key = StreamKey(
            parent_id=request.request_id,
            session_id=request.session_id,
            model=request.model,
            endpoint=request.endpoint,
            partition=request.gateway_partition,
            offset=offset,
            created_s=0,
            deadline_ms=request.deadline_ms,
            choices=1,
            token_ids=wants_ids,
        )
        super().__init__(
            key, deadline_ms=request.deadline_ms, arrived_s=now_ms / 1000, waits_for_end=is_whole
        )
        self.request, self.touched = request, touched
        self.add(request.request_id, 0, None if is_whole else position)

    @property
    def stream(self) -> CallStream:
        return self.streams[0]

    def wake(self) -> None:
        """Mark the answer as one with news."""
        self.touched[self.request.request_id] = self


@dataclass(slots=True, eq=False)
class SimGateway:
    """One process of a gateway."""

    gateway_id: str
    started_ms: int
    partition: int = 0
    epoch: int = 1
    alive: bool = True
    is_cut: bool = False  # not alive as it is cut off from the log; False: it died
    hub: Hub = field(default_factory=Hub)
    missed: list[Request] = field(default_factory=list)  # whose clients left meanwhile


class Gateways:
    """All gateways of a cluster. With a count of 0, there is one that is no member and never
    dies."""

    def __init__(
        self,
        clock: Clock,
        count: int,
        on_answer: Callable[[SimAnswer], None],
        write: Callable[[Continued], None],
        *,
        wants_ids: bool,
    ) -> None:
        """`on_answer` is called for each answer that has grown or ended.

        `write` writes a record to the log. With `wants_ids`, answers keep their token ids.
        """
        self._write = write
        self._clock, self._on_answer, self._wants_ids = clock, on_answer, wants_ids
        self.reads_whole = False  # every second answer is delivered at its end only
        self._accepted = 0
        self._touched: dict[str, SimAnswer] = {}
        self._logged: defaultdict[int, list[TokenFrame]] = defaultdict(list)
        self._only_gateway = None if count else self._make_gateway("clients", 0)
        self.by_id = {
            f"gateway-{number}": self._make_gateway(f"gateway-{number}", number + 1, number)
            for number in range(count)
        }

    def _make_gateway(
        self, gateway_id: str, started_ms: int, partition: int = 0, epoch: int = 1
    ) -> SimGateway:
        """Return a gateway that reports the progress of answers whose attempt is void."""
        gateway = SimGateway(gateway_id, started_ms, partition, epoch)

        def on_void(so_far: AnswerProgress) -> None:
            self._write(progress_record(so_far, gateway_id, int(self._clock.now_ms)))

        gateway.hub.on_void = on_void
        return gateway

    @property
    def living(self) -> list[SimGateway]:
        """Return the gateways that take calls and are members of the fleet."""
        return [gateway for gateway in self.by_id.values() if gateway.alive]

    def accept(self, request: Request) -> Request:
        """Accept a request at the next gateway in turn; return it with the gateway's address."""
        gateway, gateway_request = self._only_gateway, request
        if gateway is None:
            self._accepted += 1
            gateway = self.living[self._accepted % len(self.living)]
            gateway_request = replace(
                request,
                gateway_id=gateway.gateway_id,
                gateway_partition=gateway.partition,
                gateway_started_ms=gateway.started_ms,
                keeps_running=not self._accepted % KEEPS_RUNNING_EVERY,
            )
        offset = len(self._logged[gateway.partition]) if self._only_gateway is None else 0
        gateway.hub.add(self._answer(gateway_request, offset))
        return gateway_request

    def _answer(
        self, request: Request, offset: int, position: ClientPosition | None = None
    ) -> SimAnswer:
        now_ms, is_even = self._clock.now_ms, crc32(request.request_id.encode()) % 2 == 0
        whole = self.reads_whole and is_even
        ids = self._wants_ids
        return SimAnswer(
            request, self._touched, offset, now_ms, position, wants_ids=ids, is_whole=whole
        )

    def refuse(self, request: Request) -> None:
        """Drop a request that the log did not take."""
        self.hang_up(request.request_id)

    def hang_up(self, request_id: str) -> Request | None:
        """Stop reading an answer; return its request, or None if no gateway reads it."""
        for gateway in [self._only_gateway] if self._only_gateway is not None else self.living:
            answer = gateway.hub.find(request_id)
            if isinstance(answer, SimAnswer):
                gateway.hub.remove(answer)
                return answer.request
        return None

    def frame(self, partition: int, frame: TokenFrame) -> None:
        """Pass a frame of the log to the gateways that wait for its partition."""
        if self._only_gateway is not None:
            self._take(self._only_gateway, frame)
            return
        self._logged[partition].append(frame)
        for gateway in self.living:
            if gateway.hub.waits_on(partition):
                self._take(gateway, frame)

    def _take(self, gateway: SimGateway, frame: TokenFrame) -> None:
        gateway.hub.apply(frame, self._clock.now_ms / 1000)
        touched = self._touched
        while touched:
            _, answer = touched.popitem()
            self._on_answer(answer)
            if not answer.open_streams or answer.failure is not None:
                self._forget(gateway, answer.request.request_id)

    def _forget(self, gateway: SimGateway, request_id: str) -> None:
        answer = gateway.hub.find(request_id)
        if answer is not None:
            gateway.hub.remove(answer)

    def sweep(self) -> None:
        """End the answers that time out or lack tokens."""
        now_ms = self._clock.now_ms
        for gateway in self.living:
            for call in gateway.hub.calls():
                failure = failure_of(call, now_ms / 1000, int(now_ms), GAP_MS)
                if failure is not None and isinstance(call, SimAnswer):
                    call.fail(failure)
                    self._touched.clear()
                    gateway.hub.remove(call)
                    self._on_answer(call)

    def answers_at(self, gateway_id: str) -> list[SimAnswer]:
        """Return the answers that a gateway reads."""
        return [call for call in self.by_id[gateway_id].hub.calls() if isinstance(call, SimAnswer)]

    def resume(self, answer: SimAnswer) -> Resumption:
        """Resume an answer of a lost gateway at one that is alive, after the client's position."""
        gateway, request, key = self.living[0], answer.request, answer.key
        now_ms = self._clock.now_ms
        gateway.hub.add(self._answer(request, key.offset, answer.stream.position()))
        for frame in self._logged[key.partition][key.offset :]:
            self._take(gateway, frame)
        return Resumption(
            request_id=request.request_id,
            session_id=request.session_id,
            gateway_id=gateway.gateway_id,
            gateway_started_ms=gateway.started_ms,
            at_ms=int(now_ms),
        )

    def join_again(self, gateway_id: str) -> SimGateway:
        """Reconnect a gateway that was cut off: the same process in a new epoch, which reads what
        it missed."""
        gateway = self.by_id[gateway_id]
        gateway.epoch, gateway.alive, gateway.is_cut = gateway.epoch + 1, True, False
        for partition, frames in self._logged.items():
            for frame in frames:
                if gateway.hub.waits_on(partition):
                    self._take(gateway, frame)
        return gateway

    def restart(self, gateway_id: str) -> SimGateway:
        """Start a new process under the gateway's name."""
        former = self.by_id[gateway_id]
        gateway = self._make_gateway(
            gateway_id, int(self._clock.now_ms), former.partition, former.epoch + 1
        )
        self.by_id[gateway_id] = gateway
        return gateway
