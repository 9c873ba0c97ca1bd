"""Which answers go on where they stopped, and behind what: for routers, workers and rebuilds alike.

A later attempt takes the tokens that its reader has as the end of its prompt. That is the same
answer where each token follows from the tokens before it alone. It begins anew where an engine
keeps something else of an answer, which it does not rebuild from a prompt: the state of a form,
penalties and forbidden words over the answer's own tokens, text that is held back because it may
become a stop string, and what searches have put in.
"""

from schemas.records import Continued, Request
from schemas.rules.sizes import PRIOR_BYTES_MAX
from schemas.rules.tokens import token_count

_TOKEN_BYTES = 4


def may_continue(request: Request) -> bool:
    """Whether an answer to it can go on behind its tokens."""
    sampling = request.sampling
    is_plain = sampling.structured is None and not sampling.stop and not sampling.bad_words
    is_penalized = bool(sampling.presence_penalty or sampling.frequency_penalty)
    return is_plain and not is_penalized and not _probes(request)


def awaits_progress(request: Request, *, continues: bool) -> bool:
    """Whether nothing is to begin before all know where the last attempt of an answer ends.

    What goes on there does, if answers are to go on at all. So does what searches while it is
    generated: all that was put in before a token that somebody reads is to be put in again, and by
    then it has been read in the log.
    """
    return _probes(request) or (continues and may_continue(request))


def _probes(request: Request) -> bool:
    return request.retrieval is not None and request.retrieval.probing is not None


def prior_answer(request: Request, continued: Continued | None) -> tuple[bytes, int]:
    """Tokens and characters behind which an answer goes on; none where it begins anew.

    So it does where nothing is left to be said but its end, which was lost.
    """
    if continued is None or not may_continue(request):
        return b"", 0
    tokens = continued.tokens
    is_sound = len(tokens) % _TOKEN_BYTES == 0 and len(tokens) <= PRIOR_BYTES_MAX
    if not is_sound or not 0 < token_count(tokens) < request.sampling.max_tokens:
        return b"", 0
    return tokens, continued.chars
