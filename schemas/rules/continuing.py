"""Decides which answers a later attempt continues where they stopped; for routers and workers.

A later attempt takes the tokens that the reader has as the end of its prompt. Engines rebuild from
these tokens the state that the rest of the answer depends on: the state of a form, counts for
penalties and bad words, and text that may become a stop string. The answer restarts only if
searches insert passages into it.
"""

from schemas.records import Continued, Request
from schemas.rules.sizes import PRIOR_BYTES_MAX
from schemas.rules.tokens import token_count

_TOKEN_BYTES = 4


def may_continue(request: Request) -> bool:
    """Return whether a later attempt can continue the request's answer after its tokens."""
    return not _probes(request)


def awaits_progress(request: Request, *, continues: bool) -> bool:
    """Return whether a new attempt must wait until it is known where the last one ends.

    An answer that is continued must, if `continues` is set. So must an answer with searches: all
    inserts before a token that the reader has must be inserted again, and by then the router has
    read them in the log.
    """
    return _probes(request) or (continues and may_continue(request))


def _probes(request: Request) -> bool:
    return request.retrieval is not None and request.retrieval.probing is not None


def prior_answer(request: Request, continued: Continued | None) -> tuple[bytes, int]:
    """Return the tokens and the number of characters after which an answer continues; none if it
    restarts. It restarts, too, if only its end, which was lost, is left to generate.
    """
    if continued is None or not may_continue(request):
        return b"", 0
    tokens = continued.tokens
    is_sound = len(tokens) % _TOKEN_BYTES == 0 and len(tokens) <= PRIOR_BYTES_MAX
    if not is_sound or not 0 < token_count(tokens) < request.sampling.max_tokens:
        return b"", 0
    return tokens, continued.chars
