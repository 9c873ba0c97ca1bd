"""KV transfers between two simulated engines, by orchestration (streams/core/README.md).

prefill_first: the decode engine reads the KV that it lacks. decode_first: the prefill engine reads
the KV that only the decode engine has, computes, and writes the rest. concurrent: both start at
once, the decode engine reports its cached tokens, and the prefill engine writes the rest. An engine
that has ended neither reads nor writes, and nothing is read from it. A fault may make transfers
fail. `KvLinks` decides how long they take.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from infra.simulator.log.clock import Clock
from infra.simulator.machine.computation import Computation
from infra.simulator.machine.latency import Setup
from infra.simulator.machine.state import EngineState
from schemas.errors import KvUnavailable
from schemas.records import KvHandle, Orchestration
from workers.llm.engine import Output


class KvLinks:
    """All links of a cluster; counts the bytes moved by each request.

    A worker has one link per direction, which carries one transfer at a time, in order of posting.
    The last of several transfers finishes as if they had shared the bandwidth.
    """

    def __init__(self, clock: Clock, setup: Setup) -> None:
        self.clock = clock
        self.setup = setup
        self.slow = 1.0  # a fault: factor on the time of transfers
        self.moved_bytes: dict[str, int] = {}  # by request
        self._free_ms: dict[tuple[str, bool], float] = {}  # by worker, and whether it sends

    def move(
        self,
        request_id: str,
        source: str,
        target: str,
        kv_bytes: int,
        on_done: Callable[[float], None],
    ) -> None:
        """Move bytes; `on_done` gets the time that it took in ms, waiting included."""
        now_ms = self.clock.now_ms
        out, into = (source, True), (target, False)
        begin_ms = max(now_ms, self._free_ms.get(out, 0.0), self._free_ms.get(into, 0.0))
        latency_ms = self.setup.link.latency_ms
        carry_ms = self.slow * (self.setup.transfer_ms(kv_bytes) - latency_ms)
        self._free_ms[out] = self._free_ms[into] = begin_ms + carry_ms
        self.moved_bytes[request_id] = self.moved_bytes.get(request_id, 0) + kv_bytes
        end_ms = begin_ms + carry_ms + latency_ms
        self.clock.at(end_ms, lambda: on_done(end_ms - now_ms))


class MoveKind(Enum):
    """Which side moves the KV: its receiver reads, or its sender writes."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvMove:
    """The start or the end (`is_done`) of a KV transfer for a job, by a handle."""

    kind: MoveKind
    job_id: str
    source: EngineState
    target: EngineState
    into: Computation  # the job that receives the KV
    handle: KvHandle
    is_done: bool
    at_ms: float


class SimKvExchange:
    """The KV transfers of a cluster; `engines` has all engines by id."""

    def __init__(self, clock: Clock, setup: Setup, links: KvLinks) -> None:
        self.engines: dict[str, EngineState] = {}
        self.move_listeners: list[Callable[[KvMove], None]] = []
        self.failures = 0  # number of next transfers that fail
        self.setup = setup
        self._clock, self._links = clock, links

    def pull(self, here: EngineState, computation: Computation) -> None:
        """Read the KV of a handed-over prompt, except for blocks cached here."""
        kv = computation.job.kv
        assert kv is not None
        source = self.engines[kv.engine_id]
        key = kv.engine_request_id
        if key not in source.handovers:  # it has expired: compute the prompt here
            here.compute(computation)
            return
        tokens = computation.prompt_tokens - self._reused_tokens(computation)
        computation.kv_bytes = self._bytes(tokens)
        if not here.buffer(computation):
            here.wake()
            return

        def on_done(took_ms: float) -> None:
            source.free(key)
            source.wake()
            if here.computations.get(computation.job_id) is not computation:
                return
            if source.is_dead:
                here.compute(computation)
                return
            _report_received(here, computation, took_ms)
            here.decode(computation, drawn_before=1)
            here.wake()

        self._carry(
            self._move(MoveKind.READ, kv, source, here, computation), computation.kv_bytes, on_done
        )

    def start_decode(self, here: EngineState, computation: Computation) -> None:
        """Report the allocated memory, or the cached tokens, to the engine that will write."""
        job, block_tokens = computation.job, self.setup.block_tokens
        if job.orchestration is Orchestration.DECODE_FIRST:
            reused_tokens = self._reused_tokens(computation) // block_tokens * block_tokens
            kv = computation.handle(here.engine_id, reused_tokens, block_tokens, job.deadline_ms)
            here.say(Output(request_id=job.request_id, kv=kv))
            return
        assert job.kv is not None
        source = self.engines[job.kv.engine_id]

        def want() -> None:
            partner = source.computations.get(job.request_id)
            if partner is not None and here.computations.get(job.request_id) is computation:
                partner.valid_tokens = self._reused_tokens(computation)
                self.write_when_ready(source, partner)

        self._clock.after(self.setup.link.latency_ms, want)

    def start_prefill(self, here: EngineState, computation: Computation) -> None:
        """Compute a prompt for a decode engine that holds memory for it, from what either side
        has."""
        target = _target(computation)
        peer = self.engines[target.engine_id]
        partner = peer.computations.get(computation.job_id)
        if computation.job.orchestration is Orchestration.DECODE_FIRST:
            computation.valid_tokens = target.tokens
            lacks_tokens = target.tokens > computation.cached_tokens
            if lacks_tokens and partner is not None and not self._has_expired(target):
                self._read_back(here, computation, peer)
                return
        elif partner is not None and partner.blocks is not None:  # decode allocated first
            computation.valid_tokens = self._reused_tokens(partner)
        here.compute(computation)

    def _read_back(self, here: EngineState, computation: Computation, peer: EngineState) -> None:
        """Read the history from the decode engine instead of computing it again."""
        assert computation.valid_tokens is not None
        kv_bytes = self._bytes(computation.valid_tokens - computation.cached_tokens)

        def on_done(took_ms: float) -> None:
            if here.computations.get(computation.job_id) is not computation:
                return
            if not peer.is_dead:
                assert computation.valid_tokens is not None
                tokens = min(computation.valid_tokens, computation.prompt_tokens - 1)
                computation.cached_tokens, computation.kv_bytes = tokens, kv_bytes
                here.name_blocks(computation, computation.valid_tokens)
            here.compute(computation)

        move = self._move(MoveKind.READ, _target(computation), peer, here, computation)
        self._carry(move, kv_bytes, on_done)

    def write_when_ready(self, here: EngineState, computation: Computation) -> None:
        """Write what the decode engine lacks, once the prompt is computed and its cached tokens are
        known."""
        if not computation.is_computed or computation.is_posted or computation.valid_tokens is None:
            return
        computation.is_posted = True
        target = _target(computation)
        peer = self.engines[target.engine_id]
        partner = peer.computations.get(computation.job_id)
        if partner is None or self._has_expired(target):  # there is no memory to write to
            self._finish_write(here, computation, 0, 0.0)
            return
        kv_bytes = self._bytes(computation.prompt_tokens - computation.valid_tokens)

        def on_done(took_ms: float) -> None:
            if here.is_dead:
                return
            if peer.computations.get(partner.job_id) is partner:
                partner.kv_bytes = kv_bytes
                _report_received(peer, partner, 0.0)  # only the writer measures the transfer time
                peer.decode(partner, drawn_before=0)
                peer.wake()
            if here.computations.get(computation.job_id) is computation:
                self._finish_write(here, computation, kv_bytes, took_ms)
                here.wake()

        move = self._move(MoveKind.WRITE, target, here, peer, partner)
        self._carry(move, kv_bytes, on_done)

    def _finish_write(
        self, here: EngineState, computation: Computation, kv_bytes: int, took_ms: float
    ) -> None:
        here.say(
            Output(
                request_id=computation.job_id,
                finish_reason="handover",
                kv_bytes=kv_bytes,
                transfer_ms=took_ms,
            )
        )
        here.drop(computation)

    def _move(
        self,
        kind: MoveKind,
        handle: KvHandle,
        source: EngineState,
        target: EngineState,
        into: Computation,
    ) -> KvMove:
        return KvMove(
            kind=kind,
            job_id=into.job_id,
            source=source,
            target=target,
            into=into,
            handle=handle,
            is_done=False,
            at_ms=self._clock.now_ms,
        )

    def _carry(self, move: KvMove, kv_bytes: int, on_done: Callable[[float], None]) -> None:
        """Transfer bytes into a job's memory, which is not reused before they have arrived."""
        source, target, into = move.source, move.target, move.into
        into.is_incoming = True
        self._notify(move)
        fails, self.failures = self.failures > 0, max(0, self.failures - 1)

        def on_arrival(took_ms: float) -> None:
            if self.move_listeners:
                self._notify(replace(move, is_done=True, at_ms=self._clock.now_ms))
            target.on_kv_arrival(into)
            if fails:
                _fail_job(move)
            else:
                on_done(took_ms)

        request_id = into.request_id
        self._links.move(request_id, source.engine_id, target.engine_id, kv_bytes, on_arrival)

    def _notify(self, move: KvMove) -> None:
        for listener in self.move_listeners:
            listener(move)

    def _reused_tokens(self, computation: Computation) -> int:
        """Return prompt tokens that need not be sent: whole cached blocks, if the setup keeps
        them."""
        if not self.setup.receiver_keeps or computation.blocks is None:
            return 0
        cached = len(computation.blocks.hashes) * self.setup.block_tokens
        return min(cached, computation.prompt_tokens)

    def _has_expired(self, handle: KvHandle) -> bool:
        return self._clock.now_ms >= handle.expires_at_ms

    def _bytes(self, tokens: int) -> int:
        return max(0, tokens) * self.setup.model.kv_bytes_per_token


def _fail_job(move: KvMove) -> None:
    """Fail the job of the engine that moved the KV, as engines do after their last retry."""
    here = move.target if move.kind is MoveKind.READ else move.source
    computation = here.computations.get(move.job_id)
    if computation is not None:
        error = KvUnavailable(f"{move.job_id}: its KV did not get through").to_wire()
        here.say(Output(request_id=move.job_id, finish_reason="error", error=error))
        here.drop(computation)
        here.wake()


def _target(computation: Computation) -> KvHandle:
    target = computation.job.kv_target
    assert target is not None
    return target


def _report_received(here: EngineState, computation: Computation, took_ms: float) -> None:
    here.say(
        Output(
            request_id=computation.job_id,
            cached_tokens=computation.cached_tokens,
            kv_bytes=computation.kv_bytes,
            transfer_ms=took_ms,
        )
    )
