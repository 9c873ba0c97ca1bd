"""Conversations derived from what was said, without a header."""

import tracemalloc

import pytest

from schemas.errors import InvalidRequest
from streams.calls.ids import (
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


def test_conversation_turns_share_session() -> None:
    sessions, history = table(), [user("hello")]
    conversations = [turn(sessions, history, "hi")]
    for text in ("and then", "go on", "more"):
        history.append(user(text))
        conversations.append(turn(sessions, history, "well, " + text))
    assert len({conversation.session_id for conversation in conversations}) == 1
    assert [conversation.turn for conversation in conversations] == [0, 1, 2, 3]


def test_conversations_with_equal_openings_have_different_sessions() -> None:
    sessions = table()
    alice, bob = [user("hello")], [user("hello")]
    first = {turn(sessions, alice, "hi").session_id, turn(sessions, bob, "hi").session_id}
    alice.append(user("more"))
    bob.append(user("more"))
    second = {turn(sessions, alice, "x").session_id, turn(sessions, bob, "x").session_id}
    assert len(first) == 2
    assert second == first


def test_repeated_turn_keeps_session() -> None:
    sessions, history = table(), [user("hello")]
    first = turn(sessions, history, "hi")
    history.append(user("more"))
    assert sessions.find("", history, 0).session_id == first.session_id
    assert sessions.find("", history, 0).session_id == first.session_id


def test_conversation_scopes_share_no_sessions() -> None:
    sessions = table()
    first = sessions.find("alice", [user("hello")], 0)
    sessions.remember(first, "hi", 0)
    history = [user("hello"), assistant("hi"), user("more")]
    assert sessions.find("bob", history, 0).session_id != first.session_id
    assert sessions.find("alice", history, 0).session_id == first.session_id


def test_conversation_lookup_ignores_space_around_answer() -> None:
    sessions = table()
    first = sessions.find("", [user("hello")], 0)
    sessions.remember(first, " hi\n", 0)
    conversation = sessions.find("", [user("hello"), assistant("hi"), user("more")], 0)
    assert conversation.session_id == first.session_id


def test_gateways_agree_on_session_after_first_turn() -> None:
    """Any gateway may answer a turn once it has read the records of the previous one."""
    gateways, history = [table(), table(), table()], [user("hello")]
    session_ids = []
    for n in range(6):
        gateway = gateways[n % 3]
        conversation = gateway.find("", history, n)
        session_ids.append(conversation.session_id)
        record = gateway.remember(conversation, f"answer {n}", n)
        assert record is not None
        for receiver in gateways:
            receiver.add(record)
            receiver.add(record)  # records may come twice
        history += [assistant(f"answer {n}"), user(f"more {n}")]
    assert len(set(session_ids)) == 1
    assert len({receiver.find("", history, 9).session_id for receiver in gateways}) == 1


def test_gateways_keep_equal_openings_of_two_users_apart() -> None:
    """Two users say the same at two gateways, until they differ."""
    first_gateway, second_gateway = table(), table()
    alice, bob = (
        first_gateway.find("", [user("hello")], 0),
        second_gateway.find("", [user("hello")], 0),
    )
    assert alice.session_id != bob.session_id
    for conversation, gateway in ((alice, first_gateway), (bob, second_gateway)):
        record = gateway.remember(conversation, "hi", 0)
        assert record is not None
        for receiver in (first_gateway, second_gateway):
            receiver.add(record)
    history = [user("hello"), assistant("hi"), user("more")]
    second = {
        first_gateway.find("", history, 1).session_id,
        first_gateway.find("", history, 1).session_id,
    }
    assert second == {alice.session_id, bob.session_id}


def test_gateways_without_records_derive_session_from_whole_history() -> None:
    """The session id then hashes the whole history, not its opening."""
    history = [user("hello"), assistant("hi"), user("more")]
    second = table().find("", history, 0)
    gateway = table()
    assert turn(gateway, history, "well").session_id == second.session_id
    history.append(user("and"))
    assert gateway.find("", history, 0).session_id == second.session_id
    opening = [user("hello"), assistant("hi")]
    apart = [
        table().find("", [*opening, user(text), assistant(text), user("?")], 0).session_id
        for text in ("of cats", "of dogs")
    ]
    assert apart[0] != apart[1]


def test_conversations_forget_idle_session() -> None:
    sessions, history = table(), [user("hello")]
    first = turn(sessions, history, "hi")
    history.append(user("more"))
    assert sessions.find("", history, 1_000).session_id == first.session_id
    assert sessions.find("", history, 2_001).session_id != first.session_id


def test_conversations_evict_oldest_entry() -> None:
    sessions = table(entries_max=2)
    histories = [[user(text)] for text in ("a", "b", "c")]
    conversations = [turn(sessions, history, "x") for history in histories]
    assert len(sessions) == 2
    lookups = [sessions.find("", [*history, user("?")], 0) for history in histories]
    same = [a.session_id == b.session_id for a, b in zip(conversations, lookups, strict=True)]
    assert same == [False, True, True]


def test_conversations_ignore_sessions_named_by_header() -> None:
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
def test_session_of_reads_known_headers(headers: dict[bytes, bytes], expected: str | None) -> None:
    assert session_of(headers) == expected


@pytest.mark.parametrize("value", [b"", b"x" * 129, b"a\xffb", b"a\x00b"])
def test_session_of_rejects_invalid_header(value: bytes) -> None:
    with pytest.raises(InvalidRequest, match="1 to 128 printable ASCII"):
        session_of({b"x-session-id": value})


def test_conversation_entry_uses_bounded_memory() -> None:
    """The table bounds the memory of a gateway, and its entries are small."""
    count, sessions = 5_000, table(entries_max=5_000)
    turns = [
        ConversationTurn(number.to_bytes(16), f"s{number:026d}", number)
        for number in range(2 * count)
    ]
    tracemalloc.start()
    try:
        for record in turns:
            sessions.add(record)
        used_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(sessions) == count
    assert (
        used_bytes / count < 250
    )  # and about 110 for its hash and its session's name, made before
