"""Builds a worker's heartbeats, with credits and load, and keeps its view of other workers.

It exists before the engine has started, and offers no capacity until `serve` is called.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from aiokafka.errors import KafkaError

from schemas.errors import BrokerUnavailable
from schemas.records import Grant, Heartbeat, Load, MemberKind, Registration, Role
from streams.log.clock import wall_ms
from streams.log.membership import Membership, OnRecord
from workers import credits
from workers.llm.active_requests import ActiveRequests
from workers.llm.engine import Engine, EngineLoad, KnowsPeers
from workers.llm.probing.jobs import ProbingJobs

log = logging.getLogger("trivium.worker")
WINDOW_S = 3.0  # over which the rate of tokens is measured
SAMPLES_MAX = 64


class StalledShare:
    """The share of the decode time of the last `window_s` seconds in which searches stalled the
    worker, from a sample with each heartbeat."""

    def __init__(self, probing: ProbingJobs, window_s: float) -> None:
        self._probing, self._window_s = probing, window_s
        self._decode_ms = 0.0  # of all answers together
        self._samples: deque[tuple[float, float, float, int]] = deque()

    def sample(self, now_s: float, decoding: int) -> float | None:
        """Add a sample and return the share, 0 to 1; None if no answer has searched.

        `decoding` is the number of answers that are being generated.
        """
        probing, samples = self._probing, self._samples
        if samples:
            self._decode_ms += (now_s - samples[-1][0]) * 1_000 * decoding
        samples.append((now_s, probing.stalled_ms, self._decode_ms, probing.asked_total))
        while len(samples) > 2 and now_s - samples[1][0] >= self._window_s:
            samples.popleft()
        _, stalled_ms, decode_ms, first_total = samples[0]
        if probing.asked_total == first_total and not len(probing):
            return None
        passed_ms = self._decode_ms - decode_ms
        return min(1.0, (probing.stalled_ms - stalled_ms) / passed_ms) if passed_ms else 0.0


@dataclass(slots=True)
class _Offer:
    """The parts of a worker whose engine is up."""

    engine: Engine
    requests: ActiveRequests
    stalls: StalledShare
    capacities: Mapping[Role, int]


class Presence:
    """A worker's membership in the fleet."""

    def __init__(self, membership: Callable[[OnRecord], Membership]) -> None:
        self._clock_s = time.monotonic
        self._beat_wanted = asyncio.Event()
        self._offer: _Offer | None = None
        self.on_router: Callable[[], None] = lambda: None  # called when a router joins
        self._samples: deque[tuple[float, int]] = deque(maxlen=SAMPLES_MAX)
        self.membership = membership(self._on_record)
        self.membership.load_source = self.load
        self.membership.grant_source = self.grants

    def serve(
        self,
        engine: Engine,
        requests: ActiveRequests,
        probing: ProbingJobs,
        capacities: Mapping[Role, int],
    ) -> None:
        """Offer the engine's capacity by role; inform an engine that is a `KnowsPeers` of peers."""
        self._offer = _Offer(engine, requests, StalledShare(probing, WINDOW_S), capacities)
        if isinstance(engine, KnowsPeers):
            engine.set_peer_metadata(self.peer_metadata)
        for member in self.membership.view.members.values():
            self._tell_engine(member.registration)

    def offer(self, capacities: Mapping[Role, int]) -> None:
        """Set the capacities by role from the next heartbeat on."""
        if self._offer is not None:
            self._offer.capacities = capacities

    def withdraw(self) -> None:
        """Offer no capacity, and no longer call the engine, which may be dead."""
        self._offer = None

    def _tell_engine(self, record: Registration) -> None:
        capability, offer = record.capability, self._offer
        if capability is None or offer is None:
            return
        if isinstance(offer.engine, KnowsPeers):
            offer.engine.observe_worker(record.member_id, record.epoch, capability.engine_id)

    def load(self) -> Load:
        """Return the engine's load; rates are over the last `WINDOW_S` seconds."""
        if self._offer is None:
            return Load()
        engine_load, requests, now_s = (
            self._offer.engine.load(),
            self._offer.requests,
            self._clock_s(),
        )
        load = load_of(engine_load, requests, self._rate(engine_load.tokens_total, now_s))
        stalled = self._offer.stalls.sample(now_s, requests.decoding)
        return load if stalled is None else replace(load, stalled_share=stalled)

    def _rate(self, tokens_total: int, now_s: float) -> float:
        samples = self._samples
        samples.append((now_s, tokens_total))
        while len(samples) > 2 and now_s - samples[1][0] >= WINDOW_S:
            samples.popleft()
        first_s, first_tokens = samples[0]
        return (tokens_total - first_tokens) / (now_s - first_s) if now_s > first_s else 0.0

    def grants(self) -> list[Grant]:
        """Return the credits of each living router, by role."""
        if self._offer is None:
            return []
        routers = self.membership.view.living(MemberKind.ROUTER, wall_ms())
        return credits.grants(self._offer.capacities, (router.member_id for router in routers))

    def peer_metadata(self, engine_id: str) -> bytes | None:
        """Return the NIXL metadata that an engine published; None while it is unknown."""
        for member in self.membership.view.members.values():
            capability = member.registration.capability
            if capability is not None and capability.engine_id == engine_id:
                return capability.nixl_metadata
        return None

    def epoch_of(self, worker_id: str) -> int:
        """Return the latest epoch of a member; 0 while it is unknown."""
        member = self.membership.view.members.get(worker_id)
        return 0 if member is None else member.epoch

    def clock_offset_ms(self, worker_id: str) -> int:
        """Return by how many ms another member's clock was measured to differ from this one's."""
        return self.membership.view.apart_ms(worker_id, self.membership.member_id)

    def _on_record(self, record: Registration | Heartbeat, offset: int, now_ms: int) -> None:
        if isinstance(record, Heartbeat):
            return
        self.membership.check_name(record)
        self._tell_engine(record)
        if record.kind is MemberKind.ROUTER:
            self._beat_wanted.set()  # a router that joins gets its credits at once
            self.on_router()

    async def beat_when_wanted(self) -> None:
        """Send heartbeats between the regular ones, until cancelled."""
        while True:
            await self._beat_wanted.wait()
            self._beat_wanted.clear()
            await self.try_beat()

    async def try_beat(self) -> None:
        """Send a heartbeat now; if that fails, the regular ones continue."""
        try:
            await self.membership.beat_now()
        except (BrokerUnavailable, KafkaError) as error:
            log.warning("%s: no heartbeat: %s", self.membership.member_id, error)


def load_of(engine_load: EngineLoad, requests: ActiveRequests, tokens_per_s: float) -> Load:
    """Return the load of an engine, including the prompts that wait in front of it."""
    gate = requests.prefill_gate
    return Load(
        running=engine_load.running,
        waiting=engine_load.waiting + len(gate),
        queued_tokens=engine_load.queued_tokens + gate.tokens,
        tokens_per_s=tokens_per_s,
        prefill_tokens_per_s=engine_load.prefill_tokens_per_s,
        step_ms=engine_load.step_ms,
        kv_blocks_used=engine_load.kv_blocks_used,
        kv_blocks_total=engine_load.kv_blocks_total,
        kv_bytes_sent=engine_load.kv_bytes_sent,
        kv_bytes_received=engine_load.kv_bytes_received,
        requests_total=requests.requests_total,
        tokens_total=engine_load.tokens_total,
        adapters=engine_load.adapters,
    )
