"""The state of a job in a simulated engine."""

from dataclasses import dataclass, field
from string import ascii_lowercase
from zlib import crc32

from infra.simulator.machine.block_cache import SequenceBlocks
from infra.simulator.machine.gpu import GpuSequence
from infra.simulator.models import answer_name
from schemas.records import KvHandle, WorkPhase
from schemas.rules.tokens import token_count
from workers.llm.engine import Job, Output

VOCABULARY = 256  # tokens; each is one byte, so an output is a slice of bytes
_ANSWER_TOKENS_MAX = 1 << 16
_TOKENS = bytes(range(VOCABULARY)) * (_ANSWER_TOKENS_MAX // VOCABULARY + 1)
_LETTERS = ascii_lowercase * (_ANSWER_TOKENS_MAX // len(ascii_lowercase) + 2)


@dataclass(slots=True, eq=False)
class Computation:
    """One job of an engine; `hashes` are of the blocks of its prompt and answer.

    Each token of an answer depends on the request, the model with its adapter, and the token's
    position alone, as with a fixed seed.
    """

    job: Job
    hashes: list[int]
    prompt_tokens: int
    output_tokens: int  # that this job has to generate
    model: str = ""  # of the engine
    blocks: SequenceBlocks | None = None
    sequence: GpuSequence | None = None
    cached_tokens: int = 0
    drawn_before: int = 0  # tokens sampled before the batch's first step with this job
    sent_tokens: int = 0
    kv_bytes: int = 0
    buffered_bytes: int = 0  # KV in the receive buffer, until the job ends
    is_incoming: bool = False  # KV is being transferred into its memory
    is_computed: bool = False  # prefill is done
    is_posted: bool = False  # the transfer of its KV to the decode engine has begun
    valid_tokens: int | None = None  # that the paired decode engine has cached; None: not known yet

    job_id: str = field(init=False)
    request_id: str = field(init=False)  # without the attempt
    first_token: int = field(init=False)
    prefill: bool = field(init=False)
    prior_tokens: int = field(init=False)  # tokens of the answer that earlier jobs have generated

    def __post_init__(self) -> None:
        self.job_id = self.job.request_id
        self.request_id = self.job_id.rpartition(".")[0]
        name = answer_name(self.request_id, self.model, self.job.adapter)
        self.first_token = crc32(name.encode()) % VOCABULARY
        self.prefill = self.job.phase is WorkPhase.PREFILL
        work = self.job.work
        plain = self.prompt_tokens if work is None else token_count(work.prompt_tokens)
        later = self.job.prompt_tokens[plain:]  # inserted passages have ids from VOCABULARY on
        self.prior_tokens = self.job.prior_tokens + sum(1 for token in later if token < VOCABULARY)

    def say(self, tokens: int, finish_reason: str = "", kv: KvHandle | None = None) -> Output:
        """Return an output with the tokens that were not sent yet, up to `tokens` in all."""
        begin, self.sent_tokens = self.sent_tokens, max(tokens, self.sent_tokens)
        begin += self.prior_tokens
        until = self.prior_tokens + self.sent_tokens
        first, at = self.first_token, self.first_token % len(ascii_lowercase)
        return Output(
            request_id=self.job_id,
            token_ids=_TOKENS[first + begin : first + until],
            text=_LETTERS[at + begin : at + until],
            finish_reason=finish_reason,
            cached_tokens=self.cached_tokens,
            kv=kv,
            kv_bytes=self.kv_bytes if self.prefill else 0,  # of a prefix that was read
        )

    def handle(self, engine_id: str, tokens: int, block_tokens: int, until_ms: int) -> KvHandle:
        """Return a handle to this job's KV."""
        return KvHandle(
            worker_id="",  # an engine does not know its worker or epoch
            worker_epoch=0,
            engine_id=engine_id,
            engine_request_id=self.job_id,
            tokens=tokens,
            block_size=block_tokens,
            expires_at_ms=until_ms,
        )
