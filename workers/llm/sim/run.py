"""A job in the simulated engine, with its stage and its answer's limit. Pure."""

from asyncio import TimerHandle
from dataclasses import dataclass, replace
from enum import Enum
from zlib import crc32

from schemas.errors import InvalidRequest
from schemas.prefix import salt_of
from schemas.records import Sampling, Structured, WireError, WorkPhase
from schemas.rules.tokens import pack_tokens
from workers.llm.engine import Job
from workers.llm.sim.arena import MASK, Digest, mix
from workers.llm.sim.batch import BatchRow
from workers.llm.sim.blocks import BlockTable
from workers.llm.sim.moves import Moving
from workers.llm.sim.settings import SCRIPT_MARKS, SimSettings
from workers.llm.sim.vocabulary import Script, Vocabulary, Writer
from workers.models.sim import SIM_MODEL

_TRIES = 64  # texts in a form, until one has only allowed tokens


class Stage(Enum):
    """The stage of a job; it has a place in the batch except in WAITING, HOLDING and ENDED."""

    WAITING = "waiting"
    FETCHING = "fetching"  # reads a peer's KV
    AWAITING = "awaiting"  # has allocated blocks; a peer will write to them
    READING = "reading"  # prefill: reads the prefix that its peer has
    PREFILLING = "prefilling"
    HOLDING = "holding"  # prefill: the peer has not allocated, or the batch is full
    WRITING = "writing"  # prefill: writes the KV into a peer's blocks
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, kw_only=True)
class SimRun(BatchRow):
    """A job, and its state in the engine."""

    request_id: str
    job: Job
    digest: Digest
    start: int  # of the digest's hashes
    writer: Writer | None
    ends_itself: bool  # the limit is the answer's own end, not max_tokens
    stage: Stage = Stage.WAITING
    cached_tokens: int = 0
    kv_bytes: int = 0
    transfer_ms: float = 0.0
    kv_missed: WireError | None = None  # why it computes a prompt instead of fetching its KV
    moving: Moving | None = None  # its latest KV move
    timer: TimerHandle | None = None  # for the end of its prefill

    @property
    def is_paired_prefill(self) -> bool:
        """Return whether its KV is written to a peer that has the job too."""
        return self.job.is_paired and self.job.phase is WorkPhase.PREFILL

    @property
    def has_ended(self) -> bool:
        """Return whether the prior tokens are all of its script."""
        return bool(self.script) and self.prior_tokens >= len(self.script)

    @property
    def refuses_prior(self) -> bool:
        """Return whether its form has another text than that of the prior tokens."""
        if self.job.sampling.structured is None or not self.prior_tokens:
            return False
        prior = self.job.prompt_tokens[-self.prior_tokens :][: len(self.script)]
        return list(prior) != list(self.script[: len(prior)])

    @property
    def salt(self) -> int:
        """Return the salt of its table: routers know the hashes by the scope alone."""
        return (self.start << 64) + ((salt_of(self.job.cache_scope) - self.start) & MASK)

    def blocks_max(self, block_size: int) -> int:
        """Return the largest number of blocks that the job may need."""
        answer = 1 if self.job.phase is WorkPhase.PREFILL else self.limit - self.prior_tokens
        return (self.prompt_tokens + answer - 1) // block_size + 1


def start_value(model: str, adapter: str) -> int:
    """Return the hash of no tokens for a model or an adapter over it: other names, other answers.

    The model "sim" alone has 0.
    """
    name = adapter or model
    return 0 if name == SIM_MODEL else salt_of(name)


def make_run(
    job: Job,
    digest: Digest,
    start: int,
    settings: SimSettings,
    vocabulary: Vocabulary,
    space_tokens: int,
) -> SimRun:
    """Return the run of a job whose answer has room for `space_tokens` more tokens."""
    sampling = job.sampling
    limit = min(sampling.max_tokens, space_tokens + job.prior_tokens)
    own_limit = settings.answer_tokens if not sampling.ignore_eos else 0
    script = _script(job, start, settings, vocabulary, limit)
    if script:
        own_limit = len(script) if len(script) <= limit else 0
    seed = mix((sampling.seed or 0) % (1 << 64)) | 1 if sampling.temperature > 0 else 0
    return SimRun(
        table=BlockTable(),
        prompt_tokens=len(job.prompt_tokens),
        limit=min(limit, own_limit) if own_limit else limit,
        prior_tokens=job.prior_tokens,
        script=[token_id for token_id, _ in script],
        min_tokens=sampling.min_tokens,
        seed=seed,
        ignore_end=sampling.ignore_eos or bool(script),
        request_id=job.request_id,
        job=job,
        digest=digest,
        start=start,
        writer=Writer(job, vocabulary, script) if script or Writer.is_needed(sampling) else None,
        ends_itself=bool(own_limit) and (own_limit < limit or bool(script)),
    )


def _script(
    job: Job, start: int, settings: SimSettings, vocabulary: Vocabulary, limit: int
) -> Script:
    """Return the tokens of an answer that is not drawn token by token; they depend on prompt, seed
    and model. The answer has a constrained form, or allowed tokens only, or the prompt has its text
    (`sim.scripted`), or its reasoning is bounded."""
    script = _unbounded_script(job, start, settings, vocabulary, limit)
    budget = job.sampling.thinking_token_budget
    if budget is None or not job.thinking_end or job.binds_reasoning:
        return script
    end = vocabulary.script(job.thinking_end)[:-1]
    if job.sampling.structured is not None and _place_of(end, script) is None:
        return script  # a text of the form, without reasoning
    if not script:
        word_ids = tuple(token_id for (token_id,) in vocabulary.ids)
        sampling = replace(job.sampling, allowed_token_ids=word_ids)
        script = vocabulary.allowed_script(
            sampling, _prompt_seed(job, start), limit + 1, settings.end_every_tokens
        )
    place = _place_of(end, script)
    if place is not None:
        return script if place <= budget else (*script[:budget], *script[place:])
    return script if len(script) <= budget else (*script[:budget], *end, *script[budget:])


def _place_of(end: Script, script: Script) -> int | None:
    """Return where an answer ends its reasoning by itself, or None."""
    ids, end_ids = [token_id for token_id, _ in script], [token_id for token_id, _ in end]
    places = range(len(ids) - len(end_ids) + 1)
    return next((i for i in places if ids[i : i + len(end_ids)] == end_ids), None)


def _prompt_seed(job: Job, start: int) -> int:
    prompt = job.prompt_tokens[: len(job.prompt_tokens) - job.prior_tokens]
    base_seed = (job.sampling.seed or 0) if job.sampling.temperature > 0 else 0
    return mix((base_seed + start + crc32(pack_tokens(prompt))) & MASK)


def _unbounded_script(
    job: Job, start: int, settings: SimSettings, vocabulary: Vocabulary, limit: int
) -> Script:
    sampling = job.sampling
    prompt = job.prompt_tokens[: len(job.prompt_tokens) - job.prior_tokens]
    if settings.scripted:
        text = vocabulary.tokenizer.decode(list(prompt), skip_special_tokens=False)
        _, opening, rest = text.rpartition(SCRIPT_MARKS[0])
        if opening:
            return vocabulary.script(rest.partition(SCRIPT_MARKS[1])[0])
    if sampling.structured is None and not sampling.allowed_token_ids:
        return ()
    vocab = vocabulary.tokenizer.get_vocab_size()
    if (highest := max(sampling.allowed_token_ids, default=0)) >= vocab:
        raise InvalidRequest(f"allowed_token_ids: expected ids below {vocab}, found {highest}")
    seed = _prompt_seed(job, start)
    if sampling.structured is not None:
        return _script_in_form(sampling.structured, sampling, seed, vocabulary, limit)
    return vocabulary.allowed_script(sampling, seed, limit + 1, settings.end_every_tokens)


def _script_in_form(
    form: Structured, sampling: Sampling, seed: int, vocabulary: Vocabulary, limit: int
) -> Script:
    # Imports a validator of schemas, which no other answer needs.
    from workers.llm.sim.forms.text import draw_text

    allowed = frozenset(sampling.allowed_token_ids)
    for number in range(_TRIES):
        script = vocabulary.script(draw_text(form, (seed + number) & MASK))
        if not allowed or allowed.issuperset(token for token, _ in script[:limit]):
            return script
    raise InvalidRequest(
        f"allowed_token_ids: the simulated engine drew {_TRIES} answers in the form, and none has "
        "only allowed tokens"
    )
