"""Conversations derived from what was said, without a header."""

import tracemalloc

import pytest

from schemas.errors import InvalidRequest
from streams.gateway.request.conversation import (
    Conversation,
    Conversations,
    ConversationTurn,
    session_of,
)

Messages = list[dict[str, str]]


def table(**changes: int) -> Conversations:
    return Conversations(**{"entries_max": 100, "idle_ms": 1_000, **changes})


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def turn(sessions: Conversations, history: Messages, answer: str, now_ms: int = 0) -> Conversation:
    """Ask, and remember the answer; extends the history."""
    conversation = sessions.find("", history, now_ms)
    sessions.remember(conversation, answer, now_ms)
    history.append(assistant(answer))
    return conversation


def test_the_turns_of_a_conversation_are_one_session() -> None:
    sessions, history = table(), [user("hello")]
    conversations = [turn(sessions, history, "hi")]
    for text in ("and then", "go on", "more"):
        history.append(user(text))
        conversations.append(turn(sessions, history, "well, " + text))
    assert len({conversation.session_id for conversation in conversations}) == 1
    assert [conversation.turn for conversation in conversations] == [0, 1, 2, 3]


def test_equal_words_are_not_one_session() -> None:
    sessions = table()
    alice, bob = [user("hello")], [user("hello")]
    first = {turn(sessions, alice, "hi").session_id, turn(sessions, bob, "hi").session_id}
    alice.append(user("more"))
    bob.append(user("more"))
    second = {turn(sessions, alice, "x").session_id, turn(sessions, bob, "x").session_id}
    assert len(first) == 2
    assert second == first


def test_a_turn_asked_again_stays_in_its_session() -> None:
    sessions, history = table(), [user("hello")]
    first = turn(sessions, history, "hi")
    history.append(user("more"))
    assert sessions.find("", history, 0).session_id == first.session_id
    assert sessions.find("", history, 0).session_id == first.session_id


def test_scopes_never_share() -> None:
    sessions = table()
    first = sessions.find("alice", [user("hello")], 0)
    sessions.remember(first, "hi", 0)
    history = [user("hello"), assistant("hi"), user("more")]
    assert sessions.find("bob", history, 0).session_id != first.session_id
    assert sessions.find("alice", history, 0).session_id == first.session_id


def test_space_around_an_answer_does_not_matter() -> None:
    sessions = table()
    first = sessions.find("", [user("hello")], 0)
    sessions.remember(first, " hi\n", 0)
    conversation = sessions.find("", [user("hello"), assistant("hi"), user("more")], 0)
    assert conversation.session_id == first.session_id


def test_gateways_agree_on_a_conversation_from_its_first_turn_on() -> None:
    """Whichever answers a turn, once the others have heard of the one before."""
    gateways, history = [table(), table(), table()], [user("hello")]
    session_ids = []
    for n in range(6):
        gateway = gateways[n % 3]
        conversation = gateway.find("", history, n)
        session_ids.append(conversation.session_id)
        told = gateway.remember(conversation, f"answer {n}", n)
        assert told is not None
        for each in gateways:
            each.add(told)
            each.add(told)  # records may come twice
        history += [assistant(f"answer {n}"), user(f"more {n}")]
    assert len(set(session_ids)) == 1
    assert len({each.find("", history, 9).session_id for each in gateways}) == 1


def test_gateways_that_share_words_keep_equal_openings_apart() -> None:
    """Two users who say the same, on two gateways, until they differ."""
    one, other = table(), table()
    alice, bob = one.find("", [user("hello")], 0), other.find("", [user("hello")], 0)
    assert alice.session_id != bob.session_id
    for conversation, gateway in ((alice, one), (bob, other)):
        told = gateway.remember(conversation, "hi", 0)
        assert told is not None
        for each in (one, other):
            each.add(told)
    history = [user("hello"), assistant("hi"), user("more")]
    second = {one.find("", history, 1).session_id, one.find("", history, 1).session_id}
    assert second == {alice.session_id, bob.session_id}


def test_gateways_without_memory_agree_on_a_turn_and_share_no_openings() -> None:
    """The id then comes from all that was said, not from how it began."""
    history = [user("hello"), assistant("hi"), user("more")]
    second = table().find("", history, 0)
    other = table()
    assert turn(other, history, "well").session_id == second.session_id
    history.append(user("and"))
    assert other.find("", history, 0).session_id == second.session_id
    opening = [user("hello"), assistant("hi")]
    apart = [
        table().find("", [*opening, user(text), assistant(text), user("?")], 0).session_id
        for text in ("of cats", "of dogs")
    ]
    assert apart[0] != apart[1]


def test_an_idle_session_is_forgotten() -> None:
    sessions, history = table(), [user("hello")]
    first = turn(sessions, history, "hi")
    history.append(user("more"))
    assert sessions.find("", history, 1_000).session_id == first.session_id
    assert sessions.find("", history, 2_001).session_id != first.session_id


def test_the_table_is_bounded_and_the_oldest_goes() -> None:
    sessions = table(entries_max=2)
    histories = [[user(text)] for text in ("a", "b", "c")]
    conversations = [turn(sessions, history, "x") for history in histories]
    assert len(sessions) == 2
    again = [sessions.find("", [*history, user("?")], 0) for history in histories]
    same = [a.session_id == b.session_id for a, b in zip(conversations, again, strict=True)]
    assert same == [False, True, True]


def test_a_session_that_a_header_named_is_not_remembered() -> None:
    sessions = table()
    sessions.remember(Conversation(session_id="mine", turn=0), "hi", 0)
    assert len(sessions) == 0


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({b"x-session-id": b" abc "}, "abc"),
        ({b"x-claude-code-session-id": b"c1"}, "c1"),
        ({b"session_id": b"codex"}, "codex"),
        ({b"session-id": b"x", b"x-session-id": b"ours"}, "ours"),
    ],
)
def test_headers_that_name_a_session(headers: dict[bytes, bytes], expected: str | None) -> None:
    assert session_of(headers) == expected


@pytest.mark.parametrize("value", [b"", b"x" * 129, b"a\xffb", b"a\x00b"])
def test_a_header_that_cannot_be_an_id_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidRequest, match="1 to 128 printable ASCII"):
        session_of({b"x-session-id": value})


def test_a_remembered_conversation_takes_so_many_bytes_as_the_page_says() -> None:
    """A gateway's memory is bounded by its table, and entries are small."""
    count, sessions = 5_000, table(entries_max=5_000)
    turns = [
        ConversationTurn(number.to_bytes(16), f"s{number:026d}", number)
        for number in range(2 * count)
    ]
    tracemalloc.start()
    try:
        for each in turns:
            sessions.add(each)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(sessions) == count
    assert taken / count < 250  # and about 110 for its hash and its session's name, made before
