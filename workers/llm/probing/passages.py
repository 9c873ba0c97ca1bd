"""Chooses the passages of a search that are inserted into an answer. Pure."""

from collections.abc import Container, Sequence

from schemas.records import Passage, Probing
from schemas.rules.tokens import is_insertable, token_count


def around_tokens(probing: Probing) -> int:
    """Return the number of tokens that are inserted before and after passages."""
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
    """Return the best new passages that fit, and the number of new ones left out.

    Passages are inserted whole. Together they have at most `tokens_max` tokens, and at most
    `space_tokens` with the tokens around them. None contains a `reserved` token.
    """
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
    """Return the packed tokens to insert for these passages; empty for no passages."""
    if not passages:
        return b""
    between = probing.joint.join(passage.tokens for passage in passages)
    return probing.lead + between + probing.trail
