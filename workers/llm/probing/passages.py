"""What of a search goes into an answer. Pure."""

from collections.abc import Container, Sequence

from schemas.records import Passage, Probing
from schemas.rules.tokens import may_be_put_in, token_count


def around_tokens(probing: Probing) -> int:
    """What stands before and after passages."""
    return token_count(probing.lead) + token_count(probing.trail)


def chosen(
    probing: Probing,
    found: Sequence[Passage],
    known: Container[str],
    *,
    reserved: bytes,
    tokens_max: int,
    room_tokens: int,
) -> tuple[tuple[Passage, ...], int]:
    """The best that are new and fit: whole ones of `tokens_max` tokens together, none of them
    `reserved`, and in `room_tokens` with what stands around them; and how many new ones do not."""
    left, room, left_out = tokens_max, room_tokens - around_tokens(probing), 0
    kept: list[Passage] = []
    for passage in found:
        if len(kept) >= probing.k:
            break
        needed = token_count(passage.tokens)
        joined = needed + (token_count(probing.joint) if kept else 0)
        fits = needed <= left and joined <= room
        if passage.passage_id in known:
            continue
        if fits and may_be_put_in(passage.tokens, reserved):
            kept.append(passage)
            left, room = left - needed, room - joined
        else:
            left_out += 1
    return tuple(kept), left_out


def put_in(probing: Probing, passages: Sequence[Passage]) -> bytes:
    """Their tokens, as they go into the answer; none for none."""
    if not passages:
        return b""
    between = probing.joint.join(passage.tokens for passage in passages)
    return probing.lead + between + probing.trail
