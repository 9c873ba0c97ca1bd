"""What a simulated worker keeps of one request, and the records that it writes about it."""

from dataclasses import dataclass
from typing import Any

from infra.simulator.blocks import Held
from infra.simulator.clock import Alarm
from infra.simulator.engine import Sequence
from infra.simulator.script import Conversation
from schemas.errors import DeadlineExceeded
from schemas.records import (
    KvHandle,
    Mode,
    Outcome,
    OutcomeKind,
    Phase,
    PhaseKind,
    Work,
    WorkPhase,
)
from schemas.rules.phases import phase_of


@dataclass(slots=True, eq=False)
class Job:
    """One attempt of a request on one worker."""

    work: Work
    said: Conversation
    prompt_tokens: int
    output_tokens: int  # of the whole answer
    started_ms: float
    sequence: Sequence | None = None
    held: Held | None = None
    alarm: Alarm | None = None
    cached_tokens: int = 0
    first_ms: float = 0.0
    kv_bytes: int = 0
    buffered_bytes: int = 0  # received outside the engine's memory, until the job ends
    transfer_ms: float = 0.0
    computed: bool = False  # prefill is done
    posted: bool = False  # and its KV is on the way to the decode worker
    valid_tokens: int | None = None  # that a paired decode worker has; None until it says so
    peer_id: str = ""

    @property
    def key(self) -> str:
        return f"{self.work.request_id}.{self.work.attempt}"

    @property
    def prefill(self) -> bool:
        return self.work.phase is WorkPhase.PREFILL

    @property
    def paired(self) -> bool:
        return self.work.orchestration.is_paired

    @property
    def ends_request(self) -> bool:
        """Whether this side writes the outcome: of a pair, only decode does."""
        return not (self.prefill and self.paired)

    def handle(self, tokens: int, block_tokens: int, expires_at_ms: int) -> KvHandle:
        """Where this job's KV lies."""
        work = self.work
        return KvHandle(
            worker_id=work.worker_id,
            worker_epoch=work.worker_epoch,
            engine_id=work.worker_id,
            engine_request_id=self.key,
            tokens=tokens,
            block_size=block_tokens,
            expires_at_ms=expires_at_ms,
        )

    def phase(self, kind: PhaseKind, now_ms: float, **more: Any) -> Phase:
        """A finished step."""
        fields: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "kv_bytes": self.kv_bytes,
            "transfer_ms": self.transfer_ms,
            **more,
        }
        return phase_of(self.work, kind, int(self.started_ms), int(now_ms), **fields)

    def outcome(self, kind: OutcomeKind, now_ms: float) -> Outcome:
        """The end."""
        work = self.work
        error = None
        if kind is OutcomeKind.EXPIRED:
            error = DeadlineExceeded(f"request {work.request_id}: deadline passed").to_wire()
        remote = work.mode is Mode.REMOTE
        return Outcome(
            request_id=work.request_id,
            session_id=work.session_id,
            attempt=work.attempt,
            kind=kind,
            finish_reason="length" if kind is OutcomeKind.COMPLETED else "",
            error=error,
            written_by=work.worker_id,
            mode=work.mode,
            prefill_worker=work.worker_id if self.prefill else work.prefill_worker * remote,
            decode_worker="" if self.prefill else work.worker_id,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.output_tokens if kind is OutcomeKind.COMPLETED else 0,
            cached_tokens=self.cached_tokens if not remote or self.paired else work.cached_tokens,
            kv_bytes=self.kv_bytes,
            arrived_ms=work.arrived_ms,
            first_token_ms=int(self.first_ms) or work.first_token_ms,
            ended_ms=int(now_ms),
            orchestration=work.orchestration,
        )
