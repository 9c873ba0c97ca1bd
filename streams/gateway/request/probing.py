"""What a chat wishes to have searched again while its answer is generated: from
`retrieval.probes` to the record that tells decode workers when, how often, and in which form what
they find goes into the answer. What they search for is theirs to say.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from schemas.errors import InvalidRequest
from schemas.records import Probing
from schemas.rules.tokens import pack_tokens
from streams.gateway.config import GatewaySettings
from streams.gateway.request.body import ProbesBody, SearchBody

_USUAL = Probing()


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Probes that passed every check."""

    body: ProbesBody
    form: tuple[list[int], list[int], list[int]]  # lead, joint, trail
    tokens_max: int  # wanted for all passages of an answer together
    min_score: float

    @property
    def around(self) -> int:
        """Tokens before, between and after their passages at most."""
        lead, joint, trail = map(len, self.form)
        return (lead + joint * (self._k - 1) + trail) * self._probes_max

    @property
    def tokens(self) -> int:
        """What they add to an answer at most."""
        return self.tokens_max + self.around

    def record(self, room: int) -> Probing | None:
        """For decode workers, with so many tokens to put in; None where nothing fits."""
        tokens_max = min(self.tokens_max, room - self.around)
        if tokens_max <= 0:
            return None
        body, every = self.body, self.body.every or _USUAL.every
        lead, joint, trail = map(pack_tokens, self.form)
        return Probing(
            trigger=body.trigger or _USUAL.trigger,
            every=every,
            lookahead=min(_USUAL.lookahead, every) if body.lookahead is None else body.lookahead,
            probes_max=self._probes_max,
            k=self._k,
            tokens_max=tokens_max,
            min_score=self.min_score,
            stall_ms=_USUAL.stall_ms if body.stall_ms is None else body.stall_ms,
            is_warm=body.warm is not False,
            lead=lead,
            joint=joint,
            trail=trail,
        )

    @property
    def _k(self) -> int:
        return self.body.k or _USUAL.k

    @property
    def _probes_max(self) -> int:
        return self.body.max or _USUAL.probes_max


def probe_of(
    wished: SearchBody,
    settings: GatewaySettings,
    ids_of: Callable[[Sequence[str]], list[int]],
) -> Probe | None:
    """What the search wishes of probes, if anything; raises InvalidRequest."""
    probes = wished.probes
    if probes is None:
        return None
    every = probes.every or _USUAL.every
    if probes.lookahead is not None and probes.lookahead > every:
        raise InvalidRequest(
            f"retrieval.probes.lookahead: expected at most every={every}, found {probes.lookahead}",
            "retrieval.probes.lookahead",
        )
    min_score = probes.min_score if probes.min_score is not None else wished.min_score
    texts = (settings.probe_lead, settings.probe_joint, settings.probe_trail)
    lead, joint, trail = (ids_of([text]) for text in texts)
    return Probe(
        body=probes,
        form=(lead, joint, trail),
        tokens_max=probes.tokens_max or settings.probe_tokens_max,
        min_score=settings.retrieval_min_score if min_score is None else min_score,
    )
