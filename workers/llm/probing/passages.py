"""What of a search goes into an answer. Pure."""

from collections.abc import Container, Sequence

from schemas.records import Passage, Probing
from schemas.rules.tokens import is_insertable, token_count


def around_tokens(probing: Probing) -> int:
    """Return the number of tokens that stand before and after passages."""
    return token_count(probing.lead) + token_count(probing.trail)


def choose_passages(
    probing: Probing,
    passages: Sequence[Passage],
    known_ids: Container[str],
    *,
    reserved: bytes,
    tokens_max: int,
    space_tokens: int,
) -> tuple[tuple[Passage, ...], int]:
    """The best that are new and fit: whole ones of `tokens_max` tokens together, none of them
    `reserved`, and in `space_tokens` with what stands around them; and how many new ones do not."""
    tokens_left, space, left_out = tokens_max, space_tokens - around_tokens(probing), 0
    selection: list[Passage] = []
    for passage in passages:
        if len(selection) >= probing.k:
            break
        needed = token_count(passage.tokens)
        joined = needed + (token_count(probing.joint) if selection else 0)
        fits = needed <= tokens_left and joined <= space
        if passage.passage_id in known_ids:
            continue
        if fits and is_insertable(passage.tokens, reserved):
            selection.append(passage)
            tokens_left, space = tokens_left - needed, space - joined
        else:
            left_out += 1
    return tuple(selection), left_out


def insert_tokens(probing: Probing, passages: Sequence[Passage]) -> bytes:
    """Return the passages' tokens as they go into the answer; empty for no passages."""
    if not passages:
        return b""
    between = probing.joint.join(passage.tokens for passage in passages)
    return probing.lead + between + probing.trail
