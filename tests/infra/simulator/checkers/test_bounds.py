"""A frame is never larger than the bound that spares measuring it."""

from dataclasses import fields, replace
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from infra.simulator.checkers.bounds import bytes_at_most
from infra.simulator.log.bus import shared_codec
from schemas.records import StreamDeltas, StreamVoid, TokenFrame

COLUMNS = (
    *("request_ids", "attempts", "first_seqs", "first_chars", "token_counts", "token_ids"),
    *("texts", "logprobs", "ends", "starts", "retrieved", "voids", "deltas"),
)
NUMBERS = st.integers(-(1 << 31), (1 << 31) - 1)
TEXTS = st.text(max_size=40)


@given(
    st.lists(st.tuples(TEXTS, *[NUMBERS] * 4, TEXTS), max_size=50),
    st.lists(NUMBERS, max_size=200),
    TEXTS,
    st.integers(-(1 << 63), (1 << 63) - 1),
)
def test_size_bound_covers_every_token_frame(
    rows: list[tuple[str, int, int, int, int, str]], token_ids: list[int], name: str, at_ms: int
) -> None:
    columns = zip(*rows, strict=True) if rows else [()] * 6
    ids, attempts, seqs, chars, counts, texts = columns
    frame = TokenFrame(
        worker_id=name,
        at_ms=at_ms,
        request_ids=ids,
        attempts=attempts,
        first_seqs=seqs,
        first_chars=chars,
        token_counts=counts,
        token_ids=token_ids,
        texts=texts,
    )
    assert len(shared_codec().encode(frame)) <= bytes_at_most(frame) < inf
    void = StreamVoid(request_id="r", attempt=1)
    assert bytes_at_most(replace(frame, voids=(void,))) == inf
    row = StreamDeltas(request_id="r", attempt=1, first_seq=0, deltas=())
    assert bytes_at_most(replace(frame, deltas=(row,))) == inf


def test_token_frame_has_only_known_columns() -> None:
    assert {field.name for field in fields(TokenFrame)} == {"worker_id", "at_ms", *COLUMNS}
