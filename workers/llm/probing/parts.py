"""Builds the engine jobs of one answer: each has all tokens so far, and the rest to generate. Pure.

The passages of a search are inserted between two jobs. Insertions of earlier attempts are known in
advance: a job's limit ends it there, and the next job has the inserted tokens too.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from schemas.records import Insert, Orchestration, Sampling
from schemas.rules.tokens import token_array, token_count
from workers.llm.engine import Job

MANY = 1 << 31  # tokens, where the model's limit is unknown


class Parts:
    """The jobs of one answer, from `next_job`; `seq` counts only the answer's own tokens."""

    def __init__(
        self, whole: Job, inserts: Sequence[Insert], model_len: int, *, wants_logprobs: bool
    ) -> None:
        """Create one; `inserts` are repeated, `model_len` is a job's token limit, 0: none."""
        self.seq = 0
        self.inserted_tokens = 0
        self._whole, self._model_len = whole, model_len
        self._wants_logprobs = wants_logprobs
        self._inserts = deque(_valid_inserts(inserts))
        self._tokens = array("i", whole.prompt_tokens)  # then the answer with its insertions
        self._answer_start = len(self._tokens)
        self._jobs = 0

    @property
    def is_repeating(self) -> bool:
        """Return whether insertions of earlier attempts are left."""
        return bool(self._inserts)

    @property
    def answer(self) -> Sequence[int]:
        """Return the answer's tokens since the last insertion."""
        return self._tokens[self._answer_start :]

    @property
    def tokens_left(self) -> int:
        """Return how many more tokens the answer may have."""
        return self._whole.sampling.max_tokens - self.seq

    def insert_space(self) -> int:
        """Return how many tokens may be inserted so that the rest of the answer still fits."""
        if not self._model_len:
            return MANY
        return self._model_len - len(self._tokens) - self.tokens_left

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens of the answer."""
        self.seq += len(token_ids)
        self._tokens.extend(token_ids)

    def insert(self, packed: bytes) -> None:
        """Append inserted tokens, which are not the answer's own."""
        self._tokens.extend(token_array(packed))
        self._answer_start = len(self._tokens)
        self.inserted_tokens += token_count(packed)

    def is_over(self, finish_reason: str) -> bool:
        """Return whether a job ended only because an insertion is due there."""
        is_there = bool(self._inserts) and self.seq == self._inserts[0].at
        return is_there and finish_reason == "length" and self.tokens_left > 0

    def insert_due(self) -> None:
        """Insert what earlier attempts have inserted at this position."""
        while self._inserts and self._inserts[0].at == self.seq:
            self.insert(self._inserts.popleft().tokens)

    def next_job(self) -> Job:
        """Return the next job: all tokens so far as its prompt, and the rest of the answer."""
        whole, self._jobs = self._whole, self._jobs + 1
        if self._jobs == 1:  # only the first job's KV may come from a peer
            return replace(whole, sampling=self._sampling())
        return replace(
            whole,
            request_id=f"{whole.request_id}+{self._jobs}",
            prompt_tokens=array("i", self._tokens),
            sampling=self._sampling(),
            kv=None,
            orchestration=Orchestration.NONE,
            kv_target=None,
        )

    def _sampling(self) -> Sampling:
        """Return the next job's sampling, without stop strings: these may span two jobs."""
        sampling, limit = self._whole.sampling, self.tokens_left
        if self._inserts:
            limit = min(limit, self._inserts[0].at - self.seq)
        wants = self._wants_logprobs and sampling.logprobs is None
        return replace(
            sampling,
            max_tokens=limit,
            min_tokens=max(0, min(sampling.min_tokens - self.seq, limit)),
            stop=(),
            logprobs=0 if wants else sampling.logprobs,
        )


def _valid_inserts(inserts: Sequence[Insert]) -> list[Insert]:
    """Return the valid insertions by position: after the first token, of whole packed tokens."""
    sound = (
        insert
        for insert in inserts
        if insert.at > 0 and insert.tokens and not len(insert.tokens) % 4
    )
    return sorted(sound, key=lambda insert: insert.at)
