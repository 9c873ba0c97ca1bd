"""The engine protocol: what a worker needs from whatever computes tokens and KV.

Two engines implement it, `workers/llm/vllm/engine.py` and `workers/llm/sim/engine.py`;
`tests/workers/llm/test_engine_contract.py` is the one suite that both pass. An engine knows nothing
of Kafka, leases or routers.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from schemas.errors import TriviumError
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

# From an engine's id to its `Capability.nixl_metadata`; None while the fleet does not show it.
PeerMetadata = Callable[[str], bytes | None]


@frozen
class Job:
    """One phase of one request.

    A prefill job computes the prompt's KV and the first token, then holds the KV for its peer. A
    decode job generates the whole answer, from the first token on; with `kv` it fetches the
    prompt's KV instead of computing it. Both sides of a hand-over use the same `request_id` and
    `sampling`.

    In the paired orchestrations (`decode_first`, `concurrent`) both sides have the job at the same
    time. `kv` of the decode job is then a promise of the prefill engine to write the KV, and
    `kv_target` of the prefill job says where: `kv_target.block_ids` are the decode engine's blocks
    of the prompt, of which the first `kv_target.tokens` tokens are valid already. With
    `concurrent` they are empty, and the engines tell each other. A prefill job may have `kv` too:
    earlier KV of the session, which an engine that cannot read it ignores.

    A job may go on behind an answer's beginning: the last `prior_tokens` of `prompt_tokens` are of
    the answer then. Its first token has the number `prior_tokens`; `sampling` counts the whole
    answer. Where they end the answer, as its attempt could not tell any more, that is said at once
    (`early_end`).

    A job whose answer searches again while it is generated has the `work`; engines ignore it
    (`workers/llm/probing/`).
    """

    request_id: str
    phase: WorkPhase
    prompt_tokens: Sequence[int]
    sampling: Sampling
    deadline_ms: int  # wall time
    kv: KvHandle | None = None
    orchestration: Orchestration = Orchestration.NONE
    kv_target: KvHandle | None = None
    work: Work | None = None
    prior_tokens: int = 0
    cache_scope: str = ""  # it shares cached blocks with jobs of the same scope alone

    @property
    def is_paired(self) -> bool:
        """Prefill writes the KV into decode's blocks, while both have the job."""
        return is_paired(self.orchestration)

    def early_end(self, end_ids: Container[int]) -> "Output | None":
        """The end of the answer, where it stands in what was said of it already.

        `end_ids` are the model's own ends. Nothing counts as one among the first `min_tokens`.
        """
        sampling, prior_tokens = self.sampling, self.prior_tokens
        if not 0 < prior_tokens > sampling.min_tokens:
            return None
        last = self.prompt_tokens[-1]
        by_model = last in end_ids and not sampling.ignore_eos
        if not by_model and last not in sampling.stop_token_ids:
            return None
        reason = "" if by_model else str(last)
        return Output(request_id=self.request_id, finish_reason="stop", stop_reason=reason)


@frozen
class ProbeTotals:
    """What searches have done to an answer so far."""

    probes: int
    retrieved_tokens: int
    stalled_ms: float
    notice: StreamRetrieved | None = None  # what was put in now, for its reader to hear


@dataclass(slots=True, kw_only=True)
class Output:
    """What one step produced for one request.

    The last output of a request has `finish_reason` set: `stop` or `length` for an answer that is
    whole, `handover` for a prefill job whose KV waits for its peer (then `kv` is set), `abort`
    after `abort`, and `error` with `error` set. `text` may lag `token_ids` while a character or
    stop string is incomplete; texts joined up to the last output are the answer. `kv_bytes` and
    `transfer_ms` are set once, on the first output after KV was received.

    A decode job of `decode_first` begins with an output that has `kv` alone: its blocks are
    allocated, and this is the prefill job's `kv_target`. A paired prefill job gives the first token
    when it is drawn, always without a finish reason and with the `kv_bytes` of a prefix that it has
    read from there, and ends with `handover`, no `kv`, and `kv_bytes` and `transfer_ms` of what it
    wrote; the decode job's `transfer_ms` is then 0, since only the writer can measure it.

    `kv_missed` is set once, on the first output of a decode job that had `kv` and computed its
    prompt all the same: why the KV was not had.

    The last output of a decode job may have `kv`: the conversation's KV, kept for the prefill of
    its next turn.

    Nothing changes these once they are made. To make 256 frozen ones would take 1.2 ms of a step of
    5 ms, and these take 0.3 (`make bench-serving`, 256 streams).
    """

    request_id: str
    token_ids: Sequence[int] = ()
    text: str = ""
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: str = ""
    stop_reason: str = ""
    error: WireError | None = None
    kv: KvHandle | None = None
    cached_tokens: int = 0  # of the prompt; valid from the first output on
    kv_bytes: int = 0
    transfer_ms: float = 0.0
    kv_missed: WireError | None = None
    probe_totals: ProbeTotals | None = None  # set by `workers/llm/probing/`, by no engine

    @staticmethod
    def failed(request_id: str, error: TriviumError) -> "Output":
        """The last output of a job that went wrong."""
        return Output(request_id=request_id, finish_reason="error", error=error.to_wire())


@dataclass(slots=True)
class EngineLoad:
    """What the engine is doing; counters run since its start."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    step_ms: float = 0.0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    kv_bytes_sent: int = 0
    kv_bytes_received: int = 0
    kv_handles_held: int = 0  # KV that was handed over, and that no peer has read yet
    tokens_total: int = 0
    extra: dict[str, float] = field(default_factory=dict)


class Jobs(Protocol):
    """What the rules of a worker need of an engine; `workers/llm/active_requests.py` calls it."""

    def add(self, job: Job) -> None:
        """Take a job. Never blocks; what is wrong with it arrives as an output with an error."""

    def abort(self, request_id: str) -> None:
        """Stop a request and free what it holds; its last output is `abort`, if it is known."""

    def texts(self, before: Sequence[int], output: Output) -> Sequence[str]:
        """What each of an output's tokens adds to the text, after those `before` it in the answer;
        joined they are its text.
        """


class Engine(Jobs, Protocol):
    """Built, ready to serve, by an async factory `start` in the module that implements it."""

    capability: Capability

    @property
    def block_log(self) -> BlockLog | None:
        """What came into the prefix cache and what left it; None: it does not tell."""

    async def outputs(self) -> list[Output]:
        """Wait for the next step and return what it produced: at least one output, one a request.

        Raises EngineDead when the engine cannot go on. Cancelling the wait loses nothing.
        """

    def load(self) -> EngineLoad:
        """Return the engine's current figures; cheap to call."""

    async def close(self) -> None:
        """Stop for good and free memory, processes and NIXL agents."""


@runtime_checkable
class KnowsPeers(Protocol):
    """What an engine has besides, if it exchanges KV with engines of other workers.

    A worker whose engine is a `KnowsPeers` tells it of the fleet; `Engine` alone is enough for a
    replica.
    """

    def set_peer_metadata(self, peer_metadata: PeerMetadata) -> None:
        """How to find a peer; called before its first job, and again in each life."""

    def observe_worker(self, worker_id: str, epoch: int, engine_id: str) -> None:
        """The fleet knows this worker in this epoch; KV of an earlier one must be refused."""

    def begin_epoch(self, epoch: int) -> None:
        """Its own worker has lost its lease and joined again; what it held was aborted."""
