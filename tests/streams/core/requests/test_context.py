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


def request_with_retrieval(tokens: int = 10, **changes: Any) -> Request:
    return request("r1", tokens, retrieval=retrieval(**changes))


def prompt(context: PromptContext) -> list[int]:
    return unpack_tokens(context.request.prompt_tokens)


def test_context_has_passages_and_tail_at_their_places() -> None:
    context = with_context(request_with_retrieval(), retrieved("r1", passage(1), passage(2, 2)))
    passage_tokens = [901, 1000, 1001, 1002, 902, 2000, 2001, 903]
    assert prompt(context) == [0, 1, 2, 3, *passage_tokens, 4, 5, 6, 7, 904, 905, 8, 9]
    notice = context.notice
    assert [citation.passage_id for citation in notice.citations] == ["d1#0", "d2#0"]
    assert (notice.request_id, notice.collection, notice.tokens) == ("r1", "handbook", 10)
    first = notice.citations[0]
    assert (first.document_id, first.title, first.source) == ("d1", "title 1", "1.md")
    assert (first.text, first.score, first.seq) == ("text 1", 1.0, 0)


def test_context_without_tail_has_only_passages() -> None:
    context = with_context(request_with_retrieval(tail=b""), retrieved("r1", passage(1, 1)))
    assert prompt(context) == [0, 1, 2, 3, 901, 1000, 903, 4, 5, 6, 7, 8, 9]
    assert len(context.inserts) == 1


@pytest.mark.parametrize(
    ("tokens_max", "cited"),
    [(34, [1, 2]), (33, [1, 3]), (7, [1, 3]), (6, [1]), (4, [1]), (3, [3]), (2, []), (-1, [])],
)
def test_context_takes_whole_passages_within_budget(tokens_max: int, cited: list[int]) -> None:
    """The tokens around them have room besides: 4, and 1 between two passages."""
    record = retrieved("r1", passage(1, 4), passage(2, 30), passage(3, 3))
    context = with_context(request_with_retrieval(tokens_max=tokens_max), record)
    assert [int(citation.document_id[1:]) for citation in context.notice.citations] == cited
    assert context.notice.left_out == (0 if cited == [1, 2] else 3 - len(cited)), "of the best two"
    assert context.notice.tokens == len(prompt(context)) - 10 <= max(0, tokens_max) + 5
    if not cited:
        assert context.request == request_with_retrieval(tokens_max=tokens_max)


def test_context_takes_no_more_than_k_and_skips_empty_passages() -> None:
    blank, torn = replace(passage(1), tokens=b""), replace(passage(2), tokens=b"123")
    context = with_context(
        request_with_retrieval(k=1), retrieved("r1", blank, torn, passage(3), passage(4))
    )
    assert [citation.document_id for citation in context.notice.citations] == ["d3"]


def test_context_without_passages_keeps_plain_prompt() -> None:
    error = DeadlineExceeded("too late").to_wire()
    for record in (retrieved("r1"), retrieved("r1", passage(1), error=error, missing=(0, 2))):
        context = with_context(request_with_retrieval(), record)
        assert context.request == request_with_retrieval() and not context.inserts
        assert context.notice.error == record.error and not context.notice.citations
    assert context.notice.missing_shards == 2
    by_words = replace(retrieved("r1"), degraded="no embedding worker is ready")
    assert with_context(request_with_retrieval(), by_words).notice.degraded == by_words.degraded


@pytest.mark.parametrize(("at", "tail_at"), [(-5, -1), (99, 1), (10, 10), (99, 1 << 40), (0, 0)])
def test_context_loses_no_token_at_impossible_places(at: int, tail_at: int) -> None:
    context = with_context(
        request_with_retrieval(at=at, tail_at=tail_at), retrieved("r1", passage(1))
    )
    plain = [token for token in prompt(context) if token < 10]
    assert plain == list(range(10)) and len(prompt(context)) == 10 + context.notice.tokens


@pytest.mark.parametrize(
    ("room_tokens", "history"),
    [(0, []), (12, [71, 72]), (14, [71, 72]), (15, [71, 72, 73, 74, 75])],
)
def test_context_restores_history_within_room(room_tokens: int, history: list[int]) -> None:
    """Inserts come from the first on, so the prompt keeps its prefix; own passages go first."""
    own_request = request_with_retrieval(tokens_max=10, room_tokens=room_tokens)
    record = retrieved("r1", passage(1), passage(2, 2), history=HISTORY)
    context = with_context(own_request, record)
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
def test_context_leaves_out_quotes_of_changed_document(
    changed: tuple[str, ...], stays: list[int]
) -> None:
    record = retrieved("r1", passage(1), history=QUOTING, changed=changed)
    context = with_context(request_with_retrieval(room_tokens=99), record)
    assert [token for token in prompt(context) if 70 < token < 80] == stays
    assert len([insert for insert in context.inserts if insert.at < 4]) == len(stays)


def test_context_leaves_out_all_quotes_when_search_failed() -> None:
    error = DeadlineExceeded("too late").to_wire()
    record = retrieved("r1", error=error, history=QUOTING)
    context = with_context(request_with_retrieval(room_tokens=99), record)
    assert [token for token in prompt(context) if 70 < token < 80] == [73]


def test_inserts_name_quoted_documents_once() -> None:
    passages = (passage(1, content="a"), passage(2, document_id="d1", content="a"))
    context = with_context(request_with_retrieval(), retrieved("r1", *passages))
    quoted = (Quoted(document_id="d1", content="a"),)
    assert [insert.quoted for insert in context.inserts] == [quoted, quoted]
    assert quoted_in(context.inserts) == quoted
    assert quoted_in((*QUOTING, *QUOTING)) == QUOTING[1].quoted


@pytest.mark.parametrize(
    ("count", "chars", "is_remembered"),
    [
        (QUOTED_MAX, 4, True),
        (QUOTED_MAX + 1, 4, False),
        (QUOTED_MAX, 200, False),
    ],
)
def test_histories_remember_no_more_quotes_than_search_allows(
    count: int, chars: int, is_remembered: bool
) -> None:
    """A search with too many documents is invalid, and changed ones must fit a record."""
    quoted = tuple(Quoted(document_id=f"{n:0{chars}}", content="") for n in range(count))
    histories = SessionHistories(sessions_max=9, bytes_max=64 << 20)
    histories.remember(request_with_retrieval(), (Insert(at=1, tokens=b"aaaa", quoted=quoted),), 0)
    assert len(histories) == is_remembered


def beginning_of(history: tuple[Insert, ...] = (), **changes: Any) -> list[int]:
    return unpack_tokens(beginning(request_with_retrieval(**changes), history))


def test_beginning_has_prompt_up_to_passages_with_history() -> None:
    """It has what earlier turns had, as far as that surely fits."""
    assert beginning_of() == [0, 1, 2, 3]
    assert beginning_of(HISTORY, room_tokens=99) == [0, 71, 72, 1, 2, 73, 74, 75, 3]
    own_tokens = 40 + 4 + 2 * 1  # passages, what stands around them, and between
    assert beginning_of(HISTORY, room_tokens=own_tokens + 4) == [0, 71, 72, 1, 2, 3]
    assert beginning_of(at=-3) == [] and beginning_of(at=99) == list(range(10))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_every_prompt_starts_with_its_beginning(count: int) -> None:
    own_request = request_with_retrieval(room_tokens=60)
    record = retrieved("r1", *[passage(n) for n in range(1, count + 1)], history=HISTORY)
    whole = with_context(own_request, record).request.prompt_tokens
    assert whole.startswith(beginning(own_request, HISTORY))


# Sessions


def turns(histories: SessionHistories, *, edited: bool = False) -> tuple[list[int], list[int]]:
    """The prompts of two turns of a session, with two passages each."""
    first = replace(request_with_retrieval(10), session_id="s")
    context = with_context(first, retrieved("r1", passage(1)))
    histories.remember(first, context.inserts, 0)
    plain = [*range(10), *range(50, 60)]
    if edited:
        plain[9] = 99
    place = retrieval(at=16, tail_at=18, history_tokens=15, room_tokens=100)
    second = replace(first, request_id="r2", prompt_tokens=pack_tokens(plain), retrieval=place)
    later = retrieved("r2", passage(2), history=histories.inserts_of(second))
    return prompt(context), prompt(with_context(second, later))


def test_session_prompts_extend_each_other() -> None:
    first, second = turns(SessionHistories(sessions_max=9, bytes_max=1 << 20))
    assert len(first) > 10 and second[: len(first)] == first
    assert second[len(first) :][:6] == list(range(50, 56))


def test_histories_restore_nothing_for_other_history() -> None:
    """A client may edit earlier turns, or the router may not have seen them."""
    for histories, edited in (
        (SessionHistories(sessions_max=9, bytes_max=1 << 20), True),
        (SessionHistories(sessions_max=9, bytes_max=100), False),
    ):
        first, second = turns(histories, edited=edited)
        assert 1000 in first and 1000 not in second and 2000 in second


def test_histories_compare_only_turns_that_repeat() -> None:
    histories = SessionHistories(sessions_max=9, bytes_max=1 << 20)
    first = request_with_retrieval(10)
    histories.remember(first, HISTORY, 0)
    next_request = replace(first, prompt_tokens=pack_tokens(range(20)))
    for search, inserts in (
        (retrieval(at=20, history_tokens=10), HISTORY),
        (retrieval(at=20, history_tokens=9), ()),
        (retrieval(at=9, history_tokens=10), ()),
        (None, ()),
    ):
        assert histories.inserts_of(replace(next_request, retrieval=search)) == inserts
    next_request = replace(next_request, retrieval=retrieval(at=20, history_tokens=10))
    assert histories.inserts_of(next_request) == HISTORY
    assert histories.inserts_of(replace(next_request, session_id="other")) == ()


def test_histories_give_no_tenant_inserts_of_another() -> None:
    """Both tenants may name their sessions alike and ask the same."""
    histories = SessionHistories(sessions_max=9, bytes_max=1 << 20)
    histories.remember(replace(request_with_retrieval(10), tenant="acme"), HISTORY, 0)
    next_request = request(
        "r2", 20, session_id="s-r1", retrieval=retrieval(at=20, history_tokens=10)
    )
    assert histories.inserts_of(replace(next_request, tenant="acme")) == HISTORY
    assert (
        histories.inserts_of(next_request)
        == histories.inserts_of(replace(next_request, tenant="other"))
        == ()
    )


def test_histories_are_bounded_and_dropped_with_their_partition() -> None:
    """The bounds are a number and bytes; the least recently used session leaves first."""
    few, small = (
        SessionHistories(sessions_max=2, bytes_max=1 << 20),
        SessionHistories(sessions_max=99, bytes_max=1_200),
    )
    for number in range(5):
        for histories in (few, small):
            session = replace(request_with_retrieval(), session_id=f"s{number}")
            histories.remember(session, HISTORY, number % 2)
    assert len(few) == len(small) == 2
    few.drop(0)
    assert list(few.by_session) == [("", "s3")]
    few.remember(replace(request_with_retrieval(), session_id="s3"), (), 1)
    assert not len(few)
    none = SessionHistories(sessions_max=0, bytes_max=1 << 20)
    none.remember(request_with_retrieval(), HISTORY, 0)
    assert not len(none)
