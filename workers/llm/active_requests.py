"""The active requests of a worker: takes work, outputs, cancellations, deadlines; fills frames.

Synchronous bookkeeping without clock and log, so that plain calls can test every rule of a worker.
It decides which records are due; `workers/loops.py` sends them.

Theory of operation: a request is active from `take` until its hand-over, outcome or failed phase,
and exactly one of these is written. Streams are keyed by the job's id, which contains the attempt,
so late outputs of a stream that has ended match no stream and are dropped. Request ids are
remembered (up to a bound), so repeated work and lower attempts are ignored.

In a paired orchestration two workers have the attempt. Only the decode worker ends it. The prefill
worker reports that it is done or has failed; at a cancellation or a deadline it writes nothing.

An attempt may continue an answer that is parsed. Its parser first takes the earlier tokens, part by
part in `catch_up`, so that a long answer does not block the worker; `ParserReplays` keeps what the
engine generates meanwhile.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Final

from schemas.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KvUnavailable,
    TriviumError,
    UnknownModel,
    WorkerRefused,
)
from schemas.records import (
    AnswerDelta,
    CancelWork,
    Outcome,
    OutcomeKind,
    Phase,
    PhaseKind,
    Role,
    StreamEnd,
    WarmPrefix,
    WireError,
    Work,
    WorkPhase,
)
from schemas.rules.phases import phase_of
from schemas.rules.sizes import check_deltas
from schemas.rules.tokens import token_array
from schemas.rules.trace import trace_of
from streams.log.clients import Headers
from workers.deadlines import NEVER_MS, Deadlines
from workers.llm.engine import Job, Output
from workers.llm.frames import Frames
from workers.llm.parsing.parsers import Parsers, parser_of
from workers.llm.parsing.replays import ParserReplays
from workers.llm.probing.jobs import ProbingJobs
from workers.llm.stream import (
    ActiveRequest,
    Peers,
    WorkerIdentity,
    allocated_phase,
    append_row,
    check_promise,
    decided_text,
    failed_phase,
    finish,
    kv_fault,
    kv_missed_phase,
    outcome_of,
    received_phase,
    stream_start,
)

OnReport = Callable[[Phase, Headers], None]
_BIT = {WorkPhase.PREFILL: 1, WorkPhase.DECODE: 2}

# Request ids that are remembered, to ignore repeated work; more where more requests are held.
SEEN_MAX: Final = 16_384


class PrefillGate:
    """Limits how many prompts the engine computes at once; further prefill jobs wait in order.

    A prompt counts until its first token is sampled; KV that waits for its peer does not count.
    """

    def __init__(self, start: Callable[[Job], None], running_max: int) -> None:
        """Create a gate with `running_max` places, 0: no limit; `start` gives the engine a job."""
        self._start, self._running_max = start, running_max
        self._running: set[str] = set()  # job ids
        self._waiting: dict[str, Job] = {}

    def __len__(self) -> int:
        """Return the number of prefill jobs that wait."""
        return len(self._waiting)

    @property
    def tokens(self) -> int:
        """Return the number of prompt tokens that wait."""
        return sum(len(job.prompt_tokens) for job in self._waiting.values())

    def add(self, job: Job) -> None:
        """Pass a job to the engine, now or when an earlier prompt is computed."""
        if job.phase is not WorkPhase.PREFILL or not self._running_max:
            self._start(job)
            return
        self._waiting[job.request_id] = job
        self._admit()

    def release(self, job_id: str) -> None:
        """Free the place of a prompt that is computed or dropped; ignore other jobs."""
        if self._running_max:
            self._running.discard(job_id)
            self._waiting.pop(job_id, None)
            self._admit()

    def clear(self) -> None:
        """Drop all waiting jobs; their requests are ending."""
        self._waiting.clear()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._running_max:
            job_id = next(iter(self._waiting))
            self._running.add(job_id)
            self._start(self._waiting.pop(job_id))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The roles, model, adapters and limits of this worker; beyond `held_max` it refuses work."""

    roles: frozenset[Role]
    model: str
    held_max: int
    seen_max: int
    gateway_partitions: int
    prefill_running_max: int = 0  # prefill prompts in the engine at once; 0: the engine decides
    adapters: frozenset[str] = frozenset()  # over the model, by name

    def takes(self, work_phase: WorkPhase) -> bool:
        """Return whether one of the roles runs the phase."""
        if work_phase is WorkPhase.PREFILL:
            return Role.PREFILL in self.roles
        return Role.DECODE in self.roles or Role.REPLICA in self.roles


class ActiveRequests:
    """All requests on this worker; `report` gets the phases that are due, `frames` the tokens."""

    def __init__(
        self,
        probing: ProbingJobs,
        identity: WorkerIdentity,
        limits: RequestLimits,
        frames: Frames,
        report: OnReport,
        peer_view: Peers,
        parsers: Parsers | None = None,
    ) -> None:
        """Set up the requests of one incarnation; `parsers` are the model's, if it has any."""
        self.draining = False
        self.requests_total = 0
        self.kv_until_ms = 0  # when the last handed-over KV expires
        self.on_empty: Callable[[], None] = lambda: None
        self.on_replay: Callable[[], None] = lambda: None  # from now on `catch_up` is due
        self.prefill_gate = PrefillGate(self._start, limits.prefill_running_max)
        self._probing = probing
        self._engine = probing.engine
        self._identity = identity
        self._limits = limits
        self._frames = frames
        self._report = report
        self._peer_view = peer_view
        self._parsers = parsers
        self._streams: dict[str, ActiveRequest] = {}  # by job id
        self._replays = ParserReplays()
        self._jobs: dict[str, str] = {}  # request id to job id
        # request id to attempt and bits of its phases
        self._attempts: dict[str, tuple[int, int]] = {}
        self._deadlines = Deadlines[str](self._streams.__contains__)  # of job ids

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def decoding(self) -> int:
        """Return the number of answers that are being generated."""
        return sum(
            1
            for stream in self._streams.values()
            if stream.seq > stream.prior_tokens and not stream.prefill
        )

    @property
    def works(self) -> list[Work]:
        """Return the work of active requests, oldest first."""
        return [stream.work for stream in self._streams.values()]

    def assign(self, roles: Collection[Role], held_max: int) -> None:
        """Change roles and limit for new work; active requests are finished in any case."""
        self._limits = dataclasses.replace(self._limits, roles=frozenset(roles), held_max=held_max)

    def is_addressed_here(self, order: Work | WarmPrefix) -> bool:
        """Return whether an order is for this worker and epoch."""
        identity = self._identity
        return (order.worker_id, order.worker_epoch) == (identity.worker_id, identity.epoch)

    def take(self, work: Work, headers: Headers, now_ms: int) -> None:
        """Start the work, or report why not; ignore work for another epoch, or seen before."""
        if not self.is_addressed_here(work) or not self._is_new(work):
            return
        older = self._jobs.get(work.request_id)
        if older is not None:  # the higher attempt voids it, and so its reports
            self._drop(self._streams[older])
            self._probing.abort(older)
        try:
            prompt_tokens = token_array(work.prompt_tokens)
            self._check(work, now_ms)
            parser = parser_of(work, prompt_tokens, self._parsers) if work.parsing else None
        except TriviumError as error:
            refused = isinstance(error, WorkerRefused)
            kind = PhaseKind.REFUSED if refused else PhaseKind.FAILED
            failure = phase_of(work, kind, now_ms, now_ms, error=error.to_wire())
            self._report(failure, headers)
            return
        stream = ActiveRequest(
            work=work,
            columns=self._frames.columns(work.gateway_partition),
            headers=trace_of(headers),
            prompt_tokens=len(prompt_tokens),
            started_ms=now_ms,
            parser=parser,
        )
        self._hold(stream)
        if work.deadline_ms <= now_ms:
            self._expire(stream, now_ms)
            return
        if parser is not None and work.prior_tokens:
            self._replays.begin(stream.job_id, parser, prompt_tokens[-work.prior_tokens :])
            self.on_replay()
        self.requests_total += 1
        self.prefill_gate.add(self._job(stream, prompt_tokens, now_ms))

    def _job(self, stream: ActiveRequest, prompt_tokens: Sequence[int], now_ms: int) -> Job:
        work, identity = stream.work, self._identity
        fault = kv_fault(work, identity, now_ms, self._peer_view)
        kv = None if fault else work.kv
        if kv is None and not stream.prefill and work.prefill_worker == identity.worker_id:
            self._probing.abort(stream.job_id)  # frees KV that was kept for a peer
        if fault:
            stream.work = dataclasses.replace(work, kv=None)
        if fault and not stream.prefill and work.kv and work.kv.worker_id != identity.worker_id:
            error = KvUnavailable(f"{stream.job_id}: {fault}").to_wire()
            self._report(kv_missed_phase(stream, error, now_ms), stream.headers)
        parser = stream.parser
        return Job(
            request_id=stream.job_id,
            phase=work.phase,
            prompt_tokens=prompt_tokens,
            sampling=work.sampling if parser is None else parser.sampling,
            deadline_ms=work.deadline_ms,
            kv=kv,
            orchestration=work.orchestration,
            kv_target=work.kv_target,
            work=work if work.probes is not None and not stream.prefill else None,
            prior_tokens=work.prior_tokens,
            prior_chars=work.prior_chars,
            template_kwargs="" if work.parsing is None else work.parsing.template_kwargs,
            binds_reasoning=parser is not None and parser.binds_reasoning,
            thinking_end="" if parser is None else parser.thinking_end,
            cache_scope=work.cache_scope,
            adapter=work.adapter,
        )

    def _start(self, job: Job) -> None:
        (self._engine if job.work is None else self._probing).add(job)

    def _is_new(self, work: Work) -> bool:
        attempt, phases = self._attempts.get(work.request_id, (0, 0))
        bit = _BIT[work.phase]
        if work.attempt < attempt or (work.attempt == attempt and phases & bit):
            return False
        self._attempts.pop(work.request_id, None)
        former_bits = phases if work.attempt == attempt else 0
        self._attempts[work.request_id] = work.attempt, bit | former_bits
        if len(self._attempts) > self._limits.seen_max:
            del self._attempts[next(iter(self._attempts))]
        return True

    def _check(self, work: Work, now_ms: int) -> None:
        limits, worker_id = self._limits, self._identity.worker_id
        if not limits.takes(work.phase):
            raise WorkerRefused(
                f"worker {worker_id} runs no {work.phase}; request {work.request_id}"
            )
        if self.draining:
            raise WorkerRefused(f"worker {worker_id} is draining; request {work.request_id}")
        if len(self._streams) >= limits.held_max:
            raise WorkerRefused(
                f"worker {worker_id} holds {len(self._streams)} requests, its most; "
                f"request {work.request_id}"
            )
        if work.model != limits.model:
            raise UnknownModel(f"worker {worker_id} serves {limits.model}, found {work.model}")
        if work.adapter not in ("", *limits.adapters):
            raise UnknownModel(f"worker {worker_id} has no adapter {work.adapter!r}")
        if not 0 <= work.gateway_partition < limits.gateway_partitions:
            raise InvalidRequest(
                f"gateway_partition: expected 0 to {limits.gateway_partitions - 1}, found "
                f"{work.gateway_partition}; request {work.request_id}"
            )
        if work.deadline_ms > now_ms:
            check_promise(work, self._identity, now_ms, self._peer_view)

    def _hold(self, stream: ActiveRequest) -> None:
        self._streams[stream.job_id] = stream
        self._jobs[stream.request_id] = stream.job_id
        self._deadlines.add(stream.work.deadline_ms, stream.job_id)

    def _drop(self, stream: ActiveRequest) -> None:
        del self._streams[stream.job_id]
        del self._jobs[stream.request_id]
        self.prefill_gate.release(stream.job_id)
        self._replays.drop(stream.job_id)
        if not self._streams:
            self.on_empty()

    def catch_up(self, now_ms: int) -> bool:
        """Have a parser take some tokens that it has missed; return whether any parser has more to
        take, after other tasks have run.
        """
        if self._replays:
            stream = self._streams[self._replays.next_job_id()]
            try:
                outputs = self._replays.turn(stream.job_id)
            except TriviumError as error:
                self._give_back_one(stream, error.to_wire(), now_ms)
            else:
                self._step(outputs, now_ms)
        return bool(self._replays)

    def step(self, outputs: Sequence[Output], now_ms: int) -> None:
        """Process the outputs of one engine step."""
        if self._replays:
            outputs = [output for output in outputs if not self._holds(output)]
        self._step(outputs, now_ms)

    def _holds(self, output: Output) -> bool:
        is_held = self._replays.holds(output)
        if is_held and output.token_ids:  # its prompt is computed
            self.prefill_gate.release(output.request_id)
        return is_held

    def _step(self, outputs: Sequence[Output], now_ms: int) -> None:
        """Process outputs whose parsers have caught up. Hot path: the loop runs for every token."""
        streams = self._streams
        for output in outputs:
            stream = streams.get(output.request_id)
            if stream is None:  # already ended
                continue
            if output.probe_totals is not None:
                stream.take(output.probe_totals)
            token_ids, text, seq, chars = output.token_ids, output.text, stream.seq, stream.chars
            deltas: Sequence[AnswerDelta] = ()
            if stream.parser is not None:
                try:
                    text, deltas = "", stream.parser.feed(token_ids)
                    check_deltas(stream.request_id, deltas)
                except TriviumError as error:
                    self._give_back_one(stream, error.to_wire(), now_ms)
                    continue
            if seq == stream.prior_tokens:
                self._begin_stream(stream, output, now_ms)
                if stream.prefill and text:
                    text = decided_text(stream, output)
            if token_ids or text:
                stream.seq = seq + len(token_ids)
                stream.chars = chars + len(text)
                if stream.repeats or output.logprobs or deltas:
                    append_row(stream, output, text, seq, chars, deltas)
                else:
                    stream.columns.row(
                        stream.request_id, stream.attempt, seq, chars, token_ids, text
                    )
            if output.kv_bytes:
                received = received_phase(stream, output, now_ms)
                if received is not None:
                    self._report(received, stream.headers)
            if output.finish_reason:
                self._finish(stream, output, now_ms)

    def _begin_stream(self, stream: ActiveRequest, output: Output, now_ms: int) -> None:
        if stream.prefill or stream.paired or stream.work.kv is None:
            stream.cached_tokens = output.cached_tokens  # otherwise the prefill worker's is kept
        if output.kv is not None and not output.finish_reason:
            self._report(allocated_phase(stream, self._identity, output.kv, now_ms), stream.headers)
        if output.kv_missed is not None:
            self._report(kv_missed_phase(stream, output.kv_missed, now_ms), stream.headers)
        if output.token_ids:
            self.prefill_gate.release(stream.job_id)
            stream.columns.start(stream_start(stream, self._identity))
            stream.first_token_ms = stream.first_token_ms or now_ms

    def _finish(self, stream: ActiveRequest, output: Output, now_ms: int) -> None:
        if output.error is not None and output.error.code == DeadlineExceeded.code:
            self._expire(stream, now_ms)
            return
        if stream.repeats:  # an end this early differs from prefill's token
            append_row(stream, output, "", stream.seq, stream.chars)
        try:
            record = finish(stream, output, self._identity, now_ms)
        except TriviumError as error:  # of the parser
            record = failed_phase(stream, error.to_wire(), now_ms)
        self._drop(stream)
        if not isinstance(record, Phase):
            self._end(stream, record)
            return
        if record.kv is None:
            self._report(record, stream.headers)
            return
        self.kv_until_ms = max(self.kv_until_ms, record.kv.expires_at_ms)
        # Decode continues after the tokens sent here, so their frame must be in the log first.
        stream.columns.report(record, stream.headers)

    def _end(self, stream: ActiveRequest, records: tuple[StreamEnd, Outcome]) -> None:
        stream.columns.end(*records, stream.headers)

    def cancel(self, order: CancelWork, now_ms: int) -> None:
        """Stop a request; free its KV even if it is no longer active.

        After a void order nothing is written: another process ended the attempt.
        """
        if order.worker_id != self._identity.worker_id:
            return
        job_id = f"{order.request_id}.{order.attempt}"
        stream = self._streams.get(job_id)
        if stream is not None:
            self._drop(stream)
            if stream.ends_request and not order.void:
                self._end(stream, outcome_of(stream, self._identity, OutcomeKind.CANCELLED, now_ms))
        self._probing.abort(job_id)

    @property
    def next_deadline_ms(self) -> int | None:
        """Return when `expire` must be called next; None without a deadline."""
        due_ms = self._deadlines.next_ms()
        return None if due_ms == NEVER_MS else int(due_ms)

    def expire(self, now_ms: int) -> None:
        """End every request whose deadline has passed."""
        for job_id in self._deadlines.pop_expired(now_ms):
            self._probing.abort(job_id)
            self._expire(self._streams[job_id], now_ms)

    def _expire(self, stream: ActiveRequest, now_ms: int) -> None:
        late_ms = now_ms - stream.work.deadline_ms
        error = DeadlineExceeded(
            f"request {stream.request_id}: the deadline passed {late_ms} ms ago in "
            f"{stream.work.phase} on {self._identity.worker_id} after {stream.seq} tokens"
        ).to_wire()
        self._drop(stream)
        if stream.ends_request:
            self._end(
                stream, outcome_of(stream, self._identity, OutcomeKind.EXPIRED, now_ms, error=error)
            )

    def give_back(self, error: WireError, now_ms: int) -> None:
        """End every request with a failed phase; the router places it again."""
        self.prefill_gate.clear()
        for stream in list(self._streams.values()):
            self._give_back_one(stream, error, now_ms)

    def _give_back_one(self, stream: ActiveRequest, error: WireError, now_ms: int) -> None:
        self._drop(stream)
        self._probing.abort(stream.job_id)
        self._report(failed_phase(stream, error, now_ms), stream.headers)

    def abandon(self) -> None:
        """Stop every request without a record: another worker may have it by now."""
        self.prefill_gate.clear()
        for stream in list(self._streams.values()):
            self._drop(stream)
            self._probing.abort(stream.job_id)
        self._frames.clear()
