"""What is put into a prompt: passages by their budget, around them, and those of earlier turns."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.errors import DeadlineExceeded
from schemas.records import Insert, Quoted, Request
from schemas.rules.sizes import QUOTED_MAX
from schemas.rules.tokens import pack_tokens, unpack_tokens
from streams.core.requests.context import (
    PromptContext,
    SessionHistories,
    beginning,
    quoted_in,
    with_context,
)
from tests.streams.builders import passage, request, retrieval, retrieved

HISTORY = (
    Insert(at=1, tokens=pack_tokens([71, 72])),
    Insert(at=3, tokens=pack_tokens([73, 74, 75])),
)


def asked(tokens: int = 10, **changes: Any) -> Request:
    return request("r1", tokens, retrieval=retrieval(**changes))


def prompt(context: PromptContext) -> list[int]:
    return unpack_tokens(context.request.prompt_tokens)


def test_passages_stand_at_their_place_and_the_tail_at_its_own() -> None:
    context = with_context(asked(), retrieved("r1", passage(1), passage(2, 2)))
    found = [901, 1000, 1001, 1002, 902, 2000, 2001, 903]
    assert prompt(context) == [0, 1, 2, 3, *found, 4, 5, 6, 7, 904, 905, 8, 9]
    told = context.notice
    assert [each.passage_id for each in told.citations] == ["d1#0", "d2#0"]
    assert (told.request_id, told.collection, told.tokens) == ("r1", "handbook", 10)
    first = told.citations[0]
    assert (first.document_id, first.title, first.source) == ("d1", "title 1", "1.md")
    assert (first.text, first.score, first.seq) == ("text 1", 1.0, 0)


def test_without_a_tail_nothing_stands_but_the_passages() -> None:
    context = with_context(asked(tail=b""), retrieved("r1", passage(1, 1)))
    assert prompt(context) == [0, 1, 2, 3, 901, 1000, 903, 4, 5, 6, 7, 8, 9]
    assert len(context.inserts) == 1


@pytest.mark.parametrize(
    ("tokens_max", "cited"),
    [(34, [1, 2]), (33, [1, 3]), (7, [1, 3]), (6, [1]), (4, [1]), (3, [3]), (2, []), (-1, [])],
)
def test_whole_passages_are_taken_within_the_budget(tokens_max: int, cited: list[int]) -> None:
    """What stands around them has room besides: 4 tokens, and 1 between two."""
    found = retrieved("r1", passage(1, 4), passage(2, 30), passage(3, 3))
    context = with_context(asked(tokens_max=tokens_max), found)
    assert [int(each.document_id[1:]) for each in context.notice.citations] == cited
    assert context.notice.left_out == (0 if cited == [1, 2] else 3 - len(cited)), "of the best two"
    assert context.notice.tokens == len(prompt(context)) - 10 <= max(0, tokens_max) + 5
    if not cited:
        assert context.request == asked(tokens_max=tokens_max)


def test_no_more_than_k_and_none_without_tokens() -> None:
    blank, torn = replace(passage(1), tokens=b""), replace(passage(2), tokens=b"123")
    context = with_context(asked(k=1), retrieved("r1", blank, torn, passage(3), passage(4)))
    assert [each.document_id for each in context.notice.citations] == ["d3"]


def test_without_anything_found_the_prompt_is_the_plain_one() -> None:
    error = DeadlineExceeded("too late").to_wire()
    for found in (retrieved("r1"), retrieved("r1", passage(1), error=error, missing=(0, 2))):
        context = with_context(asked(), found)
        assert context.request == asked() and not context.inserts
        assert context.notice.error == found.error and not context.notice.citations
    assert context.notice.missing_shards == 2
    by_words = replace(retrieved("r1"), degraded="no embedding worker is ready")
    assert with_context(asked(), by_words).notice.degraded == by_words.degraded


@pytest.mark.parametrize(("at", "tail_at"), [(-5, -1), (99, 1), (10, 10), (99, 1 << 40), (0, 0)])
def test_places_that_no_prompt_has_lose_no_token(at: int, tail_at: int) -> None:
    context = with_context(asked(at=at, tail_at=tail_at), retrieved("r1", passage(1)))
    plain = [token for token in prompt(context) if token < 10]
    assert plain == list(range(10)) and len(prompt(context)) == 10 + context.notice.tokens


@pytest.mark.parametrize(
    ("room_tokens", "history"),
    [(0, []), (12, [71, 72]), (14, [71, 72]), (15, [71, 72, 73, 74, 75])],
)
def test_what_earlier_turns_had_comes_back_as_far_as_there_is_room(
    room_tokens: int, history: list[int]
) -> None:
    """From the first on, so that what is left is a beginning; this turn's comes first."""
    own = asked(tokens_max=10, room_tokens=room_tokens)
    found = retrieved("r1", passage(1), passage(2, 2), history=HISTORY)
    context = with_context(own, found)
    assert [token for token in prompt(context) if 70 < token < 80] == history
    assert len(context.notice.citations) == 2
    if len(history) > 2:
        assert prompt(context)[:9] == [0, 71, 72, 1, 2, 73, 74, 75, 3]


QUOTING = (
    Insert(at=1, tokens=pack_tokens([71]), quoted=(Quoted(document_id="d1", content="a"),)),
    Insert(
        at=2,
        tokens=pack_tokens([72]),
        quoted=tuple(Quoted(document_id=name, content="a") for name in ("d1", "d2")),
    ),
    Insert(at=3, tokens=pack_tokens([73])),
)


@pytest.mark.parametrize(
    ("changed", "stays"),
    [((), [71, 72, 73]), (("d1",), [73]), (("d2",), [71, 73]), (("d3",), [71, 72, 73])],
)
def test_what_quotes_a_document_that_changed_is_left_out(
    changed: tuple[str, ...], stays: list[int]
) -> None:
    found = retrieved("r1", passage(1), history=QUOTING, changed=changed)
    context = with_context(asked(room_tokens=99), found)
    assert [token for token in prompt(context) if 70 < token < 80] == stays
    assert len([each for each in context.inserts if each.at < 4]) == len(stays)


def test_what_quotes_anything_is_left_out_where_the_search_failed() -> None:
    error = DeadlineExceeded("too late").to_wire()
    found = retrieved("r1", error=error, history=QUOTING)
    context = with_context(asked(room_tokens=99), found)
    assert [token for token in prompt(context) if 70 < token < 80] == [73]


def test_what_is_put_in_names_its_documents_once() -> None:
    passages = (passage(1, content="a"), passage(2, document_id="d1", content="a"))
    context = with_context(asked(), retrieved("r1", *passages))
    quoted = (Quoted(document_id="d1", content="a"),)
    assert [insert.quoted for insert in context.inserts] == [quoted, quoted]
    assert quoted_in(context.inserts) == quoted
    assert quoted_in((*QUOTING, *QUOTING)) == QUOTING[1].quoted


@pytest.mark.parametrize(
    ("count", "chars", "kept"),
    [
        (QUOTED_MAX, 4, True),
        (QUOTED_MAX + 1, 4, False),
        (QUOTED_MAX, 200, False),
    ],
)
def test_no_more_is_remembered_than_may_be_asked_and_answered(
    count: int, chars: int, kept: bool
) -> None:
    """A search that asks of too many documents is none, and what changed stands in a record."""
    quoted = tuple(Quoted(document_id=f"{n:0{chars}}", content="") for n in range(count))
    histories = SessionHistories(sessions_max=9, bytes_max=64 << 20)
    histories.remember(asked(), (Insert(at=1, tokens=b"aaaa", quoted=quoted),), 0)
    assert len(histories) == kept


def beginning_of(history: tuple[Insert, ...] = (), **changes: Any) -> list[int]:
    return unpack_tokens(beginning(asked(**changes), history))


def test_what_a_prompt_begins_with_is_known_before_anything_is_found() -> None:
    """Up to the place of the passages, with what earlier turns had, as far as it surely fits."""
    assert beginning_of() == [0, 1, 2, 3]
    assert beginning_of(HISTORY, room_tokens=99) == [0, 71, 72, 1, 2, 73, 74, 75, 3]
    own = 40 + 4 + 2 * 1  # passages, what stands around them, and between
    assert beginning_of(HISTORY, room_tokens=own + 4) == [0, 71, 72, 1, 2, 3]
    assert beginning_of(at=-3) == [] and beginning_of(at=99) == list(range(10))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_every_prompt_begins_so(count: int) -> None:
    wanted = asked(room_tokens=60)
    found = retrieved("r1", *[passage(n) for n in range(1, count + 1)], history=HISTORY)
    whole = with_context(wanted, found).request.prompt_tokens
    assert whole.startswith(beginning(wanted, HISTORY))


# Sessions


def turns(histories: SessionHistories, *, edited: bool = False) -> tuple[list[int], list[int]]:
    """The prompts of two turns of a session, with two passages each."""
    first = replace(asked(10), session_id="s")
    found = with_context(first, retrieved("r1", passage(1)))
    histories.remember(first, found.inserts, 0)
    plain = [*range(10), *range(50, 60)]
    if edited:
        plain[9] = 99
    place = retrieval(at=16, tail_at=18, history_tokens=15, room_tokens=100)
    second = replace(first, request_id="r2", prompt_tokens=pack_tokens(plain), retrieval=place)
    later = retrieved("r2", passage(2), history=histories.inserts_of(second))
    return prompt(found), prompt(with_context(second, later))


def test_a_sessions_prompts_are_beginnings_of_each_other() -> None:
    first, second = turns(SessionHistories(sessions_max=9, bytes_max=1 << 20))
    assert len(first) > 10 and second[: len(first)] == first
    assert second[len(first) :][:6] == list(range(50, 56))


def test_another_history_brings_nothing_back() -> None:
    """A client may edit what was said, or the router may not have seen it."""
    for histories, edited in (
        (SessionHistories(sessions_max=9, bytes_max=1 << 20), True),
        (SessionHistories(sessions_max=9, bytes_max=100), False),
    ):
        first, second = turns(histories, edited=edited)
        assert 1000 in first and 1000 not in second and 2000 in second


def test_only_what_repeats_earlier_turns_is_compared() -> None:
    histories = SessionHistories(sessions_max=9, bytes_max=1 << 20)
    first = asked(10)
    histories.remember(first, HISTORY, 0)
    again = replace(first, prompt_tokens=pack_tokens(range(20)))
    for known, found in (
        (retrieval(at=20, history_tokens=10), HISTORY),
        (retrieval(at=20, history_tokens=9), ()),
        (retrieval(at=9, history_tokens=10), ()),
        (None, ()),
    ):
        assert histories.inserts_of(replace(again, retrieval=known)) == found
    again = replace(again, retrieval=retrieval(at=20, history_tokens=10))
    assert histories.inserts_of(again) == HISTORY
    assert histories.inserts_of(replace(again, session_id="other")) == ()


def test_one_tenant_never_gets_what_stood_in_the_prompts_of_another() -> None:
    """Also where both name their sessions alike and ask the same."""
    histories = SessionHistories(sessions_max=9, bytes_max=1 << 20)
    histories.remember(replace(asked(10), tenant="acme"), HISTORY, 0)
    again = request("r2", 20, session_id="s-r1", retrieval=retrieval(at=20, history_tokens=10))
    assert histories.inserts_of(replace(again, tenant="acme")) == HISTORY
    assert histories.inserts_of(again) == histories.inserts_of(replace(again, tenant="other")) == ()


def test_what_is_remembered_is_bounded_and_goes_with_its_partition() -> None:
    """By number and by bytes, the least recently used first."""
    few, small = (
        SessionHistories(sessions_max=2, bytes_max=1 << 20),
        SessionHistories(sessions_max=99, bytes_max=1_200),
    )
    for number in range(5):
        for histories in (few, small):
            session = replace(asked(), session_id=f"s{number}")
            histories.remember(session, HISTORY, number % 2)
    assert len(few) == len(small) == 2
    few.drop(0)
    assert list(few.by_session) == [("", "s3")]
    few.remember(replace(asked(), session_id="s3"), (), 1)
    assert not len(few)
    none = SessionHistories(sessions_max=0, bytes_max=1 << 20)
    none.remember(asked(), HISTORY, 0)
    assert not len(none)
