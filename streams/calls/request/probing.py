"""Searches during an answer: from `retrieval.probes` to the record for decode workers.

The record says when and how often they search, and in which form they insert the passages. The
workers choose the query.
"""

from array import array
from dataclasses import dataclass

from schemas.errors import InvalidRequest
from schemas.records import Probing
from schemas.rules.tokens import pack_tokens
from streams.calls.config import GatewaySettings
from streams.calls.request.body import ProbesBody, SearchBody
from streams.calls.request.tokenizer import MarkedPrompt

_DEFAULTS = Probing()
Around = tuple["array[int]", "array[int]", "array[int]"]  # lead, joint, trail
Form = tuple["array[int]", "array[int]", "array[int]", "array[int]"]  # and tail


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The probes of a chat after every check."""

    body: ProbesBody
    form: Around
    tokens_max: int  # for all passages that probes insert into an answer
    min_score: float

    @property
    def overhead_tokens(self) -> int:
        """Return the number of tokens before, between and after the passages of one probe."""
        lead, joint, trail = map(len, self.form)
        return lead + joint * (self._k - 1) + trail

    @property
    def tokens(self) -> int:
        """Return the largest number of tokens that all probes add to an answer."""
        return self.tokens_max + self.overhead_tokens * self._probes_max

    def record(self, free_tokens: int) -> Probing | None:
        """Build the record for decode workers, which may insert `free_tokens` tokens. Few free
        tokens reduce the number of probes; returns None if not even one fits."""
        if free_tokens <= self.overhead_tokens:
            return None
        share = self.overhead_tokens + self.tokens_max // self._probes_max
        probes_max = max(1, min(self._probes_max, free_tokens // share))
        body, every = self.body, self.body.every or _DEFAULTS.every
        lead, joint, trail = map(pack_tokens, self.form)
        return Probing(
            trigger=body.trigger or _DEFAULTS.trigger,
            every=every,
            lookahead=min(_DEFAULTS.lookahead, every) if body.lookahead is None else body.lookahead,
            probes_max=probes_max,
            k=self._k,
            tokens_max=min(self.tokens_max, free_tokens - probes_max * self.overhead_tokens),
            min_score=self.min_score,
            stall_ms=_DEFAULTS.stall_ms if body.stall_ms is None else body.stall_ms,
            is_warm=body.warm is not False,
            lead=lead,
            joint=joint,
            trail=trail,
        )

    @property
    def _k(self) -> int:
        return self.body.k or _DEFAULTS.k

    @property
    def _probes_max(self) -> int:
        return self.body.max or _DEFAULTS.probes_max


def probe_of(
    search_body: SearchBody,
    probes: ProbesBody,
    settings: GatewaySettings,
    form: Around,
) -> Probe:
    """Return the probes that a search wishes; raises InvalidRequest."""
    every = probes.every or _DEFAULTS.every
    if probes.lookahead is not None and probes.lookahead > every:
        raise InvalidRequest(
            f"retrieval.probes.lookahead: expected at most every={every}, found {probes.lookahead}",
            "retrieval.probes.lookahead",
        )
    min_score = probes.min_score if probes.min_score is not None else search_body.min_score
    return Probe(
        body=probes,
        form=form,
        tokens_max=probes.tokens_max or settings.probe_tokens_max,
        min_score=settings.retrieval_min_score if min_score is None else min_score,
    )


def repeat_question(prompt: MarkedPrompt, longer: MarkedPrompt, form: Form) -> Around:
    """Return the tokens before, between and after a probe's passages: a turn that repeats the
    question.

    Chat models use passages there, but hardly in an answer of their own (`LOG.md`). `longer` is the
    prompt's chat with an empty answer and the question once more. Raises InvalidRequest if it does
    not begin with the prompt.
    """
    begin = len(prompt.ids)
    if longer.ids[:begin] != prompt.ids:
        raise InvalidRequest(
            "retrieval.probes: the model's chat template writes a chat's beginning in another way "
            "when it goes on, so nothing can be put into an answer; leave probes out",
            "retrieval.probes",
        )
    lead, joint, trail, tail = form
    question, rest = longer.ids[longer.at : longer.tail_at], longer.ids[longer.tail_at :]
    return longer.ids[begin : longer.at] + lead, joint, trail + question + tail + rest
