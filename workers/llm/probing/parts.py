"""The jobs of one answer, one after the other: each has all tokens so far, and what is left. Pure.

What a search found is put in between two of them. What earlier attempts have put in is known
before: there a job ends by its limit, and the next one has those tokens too.
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
    """`next_job` for the first and every further one; `seq` counts tokens of the answer alone."""

    def __init__(
        self, whole: Job, inserts: Sequence[Insert], model_len: int, *, wants_logprobs: bool
    ) -> None:
        """`again` is put in again; `model_len` is how many tokens a job may have, 0: any number."""
        self.seq = 0
        self.inserted_tokens = 0
        self._whole, self._model_len = whole, model_len
        self._wants_logprobs = wants_logprobs
        self._inserts = deque(_valid_inserts(inserts))
        self._tokens = array("i", whole.prompt_tokens)  # with the answer, and what was put in
        self._answer_start = len(self._tokens)
        self._jobs = 0

    @property
    def is_repeating(self) -> bool:
        """Whether something is still to be put in again."""
        return bool(self._inserts)

    @property
    def answer(self) -> Sequence[int]:
        """How the answer ends: what was said since something was put in."""
        return self._tokens[self._answer_start :]

    @property
    def tokens_left(self) -> int:
        """Tokens that the answer may still have."""
        return self._whole.sampling.max_tokens - self.seq

    def insert_space(self) -> int:
        """Tokens that may be put in, so that there is room for the rest of the answer."""
        if not self._model_len:
            return MANY
        return self._model_len - len(self._tokens) - self.tokens_left

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the answer has gone on with."""
        self.seq += len(token_ids)
        self._tokens.extend(token_ids)

    def insert(self, packed: bytes) -> None:
        """Insert tokens that are not the answer's own."""
        self._tokens.extend(token_array(packed))
        self._answer_start = len(self._tokens)
        self.inserted_tokens += token_count(packed)

    def is_over(self, finish_reason: str) -> bool:
        """Whether a job ended only because something is to be put in there again."""
        is_there = bool(self._inserts) and self.seq == self._inserts[0].at
        return is_there and finish_reason == "length" and self.tokens_left > 0

    def insert_due(self) -> None:
        """Insert again what earlier attempts have inserted at this place."""
        while self._inserts and self._inserts[0].at == self.seq:
            self.insert(self._inserts.popleft().tokens)

    def next_job(self) -> Job:
        """All tokens so far, and the rest of the answer."""
        whole, self._jobs = self._whole, self._jobs + 1
        if self._jobs == 1:  # its KV may come from a peer
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
        """Stop strings are looked for elsewhere: they may stand across two jobs."""
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
    """In the order of their places; what stands before any token, or is empty, is not put in."""
    sound = (
        insert
        for insert in inserts
        if insert.at > 0 and insert.tokens and not len(insert.tokens) % 4
    )
    return sorted(sound, key=lambda insert: insert.at)
