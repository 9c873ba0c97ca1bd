"""The engine protocol: what a worker needs from an engine that computes tokens and KV.

Two engines implement it, `workers/llm/vllm/engine.py` and `workers/llm/sim/engine.py`; both pass
the suite `tests/workers/llm/test_engine_contract.py`. Engines do not depend on Kafka, leases or
routers.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from schemas.errors import PriorRefused, TriviumError
from schemas.frozen import frozen
from schemas.records import (
    Capability,
    KvHandle,
    Orchestration,
    Sampling,
    StreamRetrieved,
    TokenLogprob,
    WireError,
    Work,
    WorkPhase,
)
from schemas.rules.pairs import is_paired
from workers.kv.block_log import BlockLog
from workers.llm.stop_strings import StopText

# Maps an engine's id to its `Capability.nixl_metadata`; None while the fleet does not list it.
PeerMetadata = Callable[[str], bytes | None]


@frozen
class Job:
    """One phase of one request.

    A prefill job computes the prompt's KV and the first token, then keeps the KV for its peer. A
    decode job generates the whole answer, from the first token on; with `kv` it fetches the
    prompt's KV instead of computing it. Both sides of a hand-over use the same `request_id`,
    `sampling` and `adapter`.

    In the paired orchestrations (`decode_first`, `concurrent`) both sides have the job at the same
    time. `kv` of the decode job is then a promise of the prefill engine to write the KV, and
    `kv_target` of the prefill job is its destination: `kv_target.block_ids` are the decode engine's
    blocks of the prompt, of which the first `kv_target.tokens` tokens are already valid. With
    `concurrent` they are empty, and the engines exchange them. A prefill job may have `kv` too:
    earlier KV of the session. An engine that cannot read it ignores it.

    A job may continue an answer: the last `prior_tokens` of `prompt_tokens` are then the answer's.
    Its first new token has the number `prior_tokens`, and `sampling` counts the whole answer: the
    rest is the same as if one job had generated all of it. If the prior tokens already end the
    answer, its only output is the end (`early_end`). `prior_chars` counts the characters that
    readers have; with stop strings these are fewer than the prior tokens', and the first output
    has the others.

    `work` is set if the answer searches while it is generated (`workers/llm/probing/`); engines
    ignore it.
    """

    request_id: str
    phase: WorkPhase
    prompt_tokens: Sequence[int]
    sampling: Sampling
    deadline_ms: int  # wall-clock time
    kv: KvHandle | None = None
    orchestration: Orchestration = Orchestration.NONE
    kv_target: KvHandle | None = None
    work: Work | None = None
    prior_tokens: int = 0
    prior_chars: int = 0
    template_kwargs: str = ""  # variables of the chat template, as a JSON object, or none
    binds_reasoning: bool = False  # the form binds from the first token on, not after reasoning
    thinking_end: str = ""  # the text that ends reasoning; empty: the model has none
    cache_scope: str = ""  # cached blocks are shared only with jobs of the same scope
    adapter: str = ""  # the LoRA adapter over the model, by name; "": the model alone

    @property
    def is_paired(self) -> bool:
        """Return whether prefill writes into decode's blocks while both engines have the job."""
        return is_paired(self.orchestration)

    @property
    def continues_stops(self) -> bool:
        """Return whether stop strings may begin or stand in the text of the prior tokens."""
        return bool(self.prior_tokens and self.sampling.stop)

    def early_end(self, end_ids: Container[int], stops: StopText | None = None) -> "Output | None":
        """Return the job's last output if its prior tokens already end the answer, else None.

        `end_ids` are the model's end-of-sequence tokens. No end counts within the first
        `min_tokens`. `stops` has taken the text of the prior tokens, if `continues_stops`.
        """
        sampling, prior_tokens = self.sampling, self.prior_tokens
        if stops is not None and stops.matched_stop:
            return Output(
                request_id=self.request_id,
                text=stops.flush(),
                finish_reason="stop",
                stop_reason=stops.matched_stop,
            )
        if not 0 < prior_tokens > sampling.min_tokens:
            return None
        last = self.prompt_tokens[-1]
        by_model = last in end_ids and not sampling.ignore_eos
        if not by_model and last not in sampling.stop_token_ids:
            return None
        return Output(
            request_id=self.request_id,
            text="" if stops is None else stops.flush(),
            finish_reason="stop",
            stop_reason="" if by_model else str(last),
        )

    def refused_prior(self) -> "Output":
        """Return the job's last output if the form of its answer refuses the prior tokens.

        The router then restarts the answer, because every attempt to continue it would fail too.
        """
        error = PriorRefused(
            f"{self.request_id}: the form of the answer refuses its first {self.prior_tokens} "
            "tokens, so the answer cannot continue after them"
        )
        return Output.failed(self.request_id, error)


@frozen
class ProbeTotals:
    """Totals of the searches of one answer so far."""

    probes: int
    retrieved_tokens: int
    stalled_ms: float
    notice: StreamRetrieved | None = None  # about the passages inserted now, for readers


@dataclass(slots=True, kw_only=True)
class Output:
    """The result of one step for one request.

    The last output of a request has `finish_reason` set: `stop` or `length` for a complete answer,
    `handover` for a prefill job whose KV waits for its peer (then `kv` is set), `abort` after
    `abort`, and `error` with `error` set. `text` may lag `token_ids` while a character or stop
    string is incomplete; the joined texts of all outputs are the answer. `kv_bytes` and
    `transfer_ms` are set once, on the first output after KV was received.

    A decode job of `decode_first` begins with an output that has only `kv`: its allocated blocks,
    which become the prefill job's `kv_target`. A paired prefill job returns the first token when it
    is sampled, without a finish reason, and with the `kv_bytes` of a prefix that it has read from
    decode. It ends with `handover`, no `kv`, and `kv_bytes` and `transfer_ms` of its write. The
    decode job's `transfer_ms` is then 0, because only the writer can measure it.

    `kv_missed` is set once, on the first output of a decode job that had `kv` but computed its
    prompt: the reason why it did not get the KV.

    The last output of a decode job may have `kv`: the conversation's KV, kept for the prefill of
    its next turn.

    Outputs are not changed after their creation. The class is not frozen, because creating 256
    frozen ones would take 1.2 ms of a step of 5 ms; these take 0.3 ms (`make bench-serving`, 256
    streams).
    """

    request_id: str
    token_ids: Sequence[int] = ()
    text: str = ""
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: str = ""
    stop_reason: str = ""
    error: WireError | None = None
    kv: KvHandle | None = None
    cached_tokens: int = 0  # cached tokens of the prompt; valid from the first output on
    kv_bytes: int = 0
    transfer_ms: float = 0.0
    kv_missed: WireError | None = None
    probe_totals: ProbeTotals | None = None  # set by `workers/llm/probing/`, by no engine

    @staticmethod
    def failed(request_id: str, error: TriviumError) -> "Output":
        """Return the last output of a job that failed."""
        return Output(request_id=request_id, finish_reason="error", error=error.to_wire())


@dataclass(slots=True)
class EngineLoad:
    """Load figures of an engine; counters run since its start."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    step_ms: float = 0.0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    kv_bytes_sent: int = 0
    kv_bytes_received: int = 0
    kv_handles_held: int = 0  # handles of KV that no peer has read yet
    tokens_total: int = 0
    adapters: tuple[str, ...] = ()  # loaded ones
    extra: dict[str, float] = field(default_factory=dict)


class Jobs(Protocol):
    """The part of an engine that the worker's rules (`workers/llm/active_requests.py`) call."""

    def add(self, job: Job) -> None:
        """Start a job. Never blocks; a faulty job gets an output with an error."""

    def abort(self, request_id: str) -> None:
        """Stop a request and free its KV; if it is known, its last output is `abort`."""

    def texts(self, before: Sequence[int], output: Output) -> Sequence[str]:
        """Return what each token of an output adds to the text; joined, they are its text.

        `before` are the answer's tokens before the output.
        """


class Engine(Jobs, Protocol):
    """An engine that is ready to serve; the async function `start` of its module creates it."""

    capability: Capability

    @property
    def block_log(self) -> BlockLog | None:
        """Return the log of prefix cache changes; None if the engine does not record them."""

    async def outputs(self) -> list[Output]:
        """Wait for the next step, and return at least one output, at most one per request.

        Raises EngineDead when the engine cannot continue. Cancelling the wait loses no output.
        """

    def load(self) -> EngineLoad:
        """Return the engine's current figures; cheap to call."""

    async def close(self) -> None:
        """Stop for good and free memory, processes and NIXL agents."""


@runtime_checkable
class KnowsPeers(Protocol):
    """The further methods of an engine that exchanges KV with engines of other workers.

    The worker passes it the members of the fleet. A replica worker's engine needs only `Engine`.
    """

    def set_peer_metadata(self, peer_metadata: PeerMetadata) -> None:
        """Set how to find a peer's metadata; called before the first job of each incarnation."""

    def observe_worker(self, worker_id: str, epoch: int, engine_id: str) -> None:
        """Note a worker's latest epoch; the engine must refuse KV of earlier ones."""

    def begin_epoch(self, epoch: int) -> None:
        """Note that the own worker lost its lease and joined again; its jobs were aborted."""
