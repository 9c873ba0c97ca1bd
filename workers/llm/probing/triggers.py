"""When an answer searches again, and where what was found goes into it. Pure.

A trigger is a class of a few lines in `TRIGGERS`. It is asked after every output whether to search
now, and then whether the place has come. It sees the text as the engine gives it.
"""

import math
import re
from collections.abc import Sequence
from typing import Protocol

from schemas.frozen import frozen
from schemas.records import Probing

_SENTENCE_END = re.compile(r"""(?:(?<!\d)[.!?…。！？]["'”’)\]]*\s*|\n\s*)\Z""")
_UNCERTAIN_BELOW = 0.5  # mean probability of the last tokens
LAST_TOKENS = 6


@frozen
class Seen:
    """An answer so far, as triggers see it."""

    tokens: int  # since the place of the last probe, or the answer's start
    asked_tokens: int  # since the search under way was asked for
    text: str  # how the answer ends
    logprobs: Sequence[float]  # of the last tokens, where the trigger wants them


class Trigger(Protocol):
    """Of one answer."""

    wants_logprobs: bool

    def asks(self, seen: Seen) -> bool:
        """Whether to search now, no search being under way."""

    def is_place(self, seen: Seen) -> bool:
        """Whether what is found goes in here, a search being under way."""


class Every:
    """After so many tokens, whatever they are."""

    wants_logprobs = False

    def __init__(self, probing: Probing) -> None:
        self._every, self._ahead = probing.every, probing.lookahead

    def asks(self, seen: Seen) -> bool:
        return seen.tokens >= self._every - self._ahead

    def is_place(self, seen: Seen) -> bool:
        return seen.tokens >= self._every


class SentenceEnd(Every):
    """Likewise, but at the first sentence end from there on."""

    def is_place(self, seen: Seen) -> bool:
        return super().is_place(seen) and _SENTENCE_END.search(seen.text) is not None


class Uncertain:
    """Where the last tokens were improbable, `lookahead` tokens later."""

    wants_logprobs = True

    def __init__(self, probing: Probing) -> None:
        self._every, self._ahead = probing.every, probing.lookahead

    def asks(self, seen: Seen) -> bool:
        if seen.tokens < self._every - self._ahead or len(seen.logprobs) < LAST_TOKENS:
            return False
        return sum(map(math.exp, seen.logprobs)) / len(seen.logprobs) < _UNCERTAIN_BELOW

    def is_place(self, seen: Seen) -> bool:
        return seen.asked_tokens >= self._ahead


TRIGGERS: dict[str, type[Every] | type[Uncertain]] = {
    "every": Every,
    "sentence": SentenceEnd,
    "uncertain": Uncertain,
}


def trigger_of(probing: Probing) -> Trigger:
    """The trigger of the name; gateways refuse others than these, so another is a newer one's."""
    return TRIGGERS.get(probing.trigger, Every)(probing)
