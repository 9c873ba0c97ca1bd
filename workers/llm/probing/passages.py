"""What of a search goes into an answer. Pure."""

from collections.abc import Container, Sequence

from schemas.records import Passage, Probing
from schemas.rules.tokens import token_count


def chosen(
    probing: Probing, found: Sequence[Passage], known: Container[str], room_tokens: int
) -> tuple[Passage, ...]:
    """The best that are new and fit, whole ones, with what stands around them."""
    left = room_tokens - token_count(probing.lead) - token_count(probing.trail)
    kept: list[Passage] = []
    for passage in found:
        if len(kept) >= probing.k:
            break
        needed = token_count(passage.tokens) + (token_count(probing.joint) if kept else 0)
        is_whole = bool(passage.tokens) and not len(passage.tokens) % 4
        if is_whole and passage.passage_id not in known and needed <= left:
            kept.append(passage)
            left -= needed
    return tuple(kept)


def put_in(probing: Probing, passages: Sequence[Passage]) -> bytes:
    """Their tokens, as they go into the answer; none for none."""
    if not passages:
        return b""
    between = probing.joint.join(passage.tokens for passage in passages)
    return probing.lead + between + probing.trail
