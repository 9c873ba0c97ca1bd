"""The topic table is consistent with itself, with the records and with the settings."""

import dataclasses
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import RecordError
from schemas.records import Heartbeat, Load, MemberState
from schemas.settings import LogSettings
from schemas.topics import (
    DAY_MS,
    DEAD_LETTER_SUFFIX,
    HOUR_MS,
    TOPICS,
    Topic,
    check_record,
    partition_of,
)
from streams.log.admin import expected_topics
from tests.schemas.examples import RECORDS, class_of

ROWS = list(TOPICS.values())
BEAT = Heartbeat(
    member_id="w", epoch=1, seq=0, at_ms=0, state=MemberState.READY, grants=(), load=Load()
)
ACTORS = {"bridge", "gateway", "router", "worker", "replay", "anyone"}


@pytest.mark.parametrize("topic", ROWS, ids=lambda t: t.name)
def test_topic_rows_are_valid(topic: Topic) -> None:
    assert TOPICS[topic.name] is topic
    assert topic.records and set(topic.records) <= set(RECORDS)
    assert topic.partition_by in ("session", "lease", "single", "retrieval", "document", "prompt")
    assert topic.cleanup in ("delete", "compact", "compact,delete")
    short = {
        "retrieval.prefill",
        "retrieval.decode",
        "embeddings",
        "hits",
    }  # nobody asks later
    assert topic.retention_ms >= (HOUR_MS if topic.name in short else DAY_MS)
    assert topic.doc.endswith(".")
    assert topic.written_by and topic.read_by
    assert set(topic.written_by) | set(topic.read_by) <= ACTORS
    assert not topic.name.endswith(DEAD_LETTER_SUFFIX)
    assert LogSettings().partitions(topic.group) >= 1


def test_session_topics_share_partition_group() -> None:
    by_session = {topic.name for topic in ROWS if topic.partition_by == "session"}
    assert by_session == {
        "requests", "cancellations", "phases", "outcomes", "decisions", "sessions", "responses",
        "usage", "decisions.shadow",
    }  # fmt: skip
    assert {TOPICS[name].group for name in by_session} == {"session"}


@pytest.mark.parametrize("topic", ROWS, ids=lambda t: t.name)
def test_topic_partition_group_matches_partition_key(topic: Topic) -> None:
    assert (topic.group == "single") == (topic.partition_by == "single")
    leased = topic.group in ("worker", "gateway", "asker")
    assert leased == (topic.partition_by == "lease")
    for group in ("retrieval", "document", "prompt"):
        assert (topic.group == group) == (topic.partition_by == group)


@pytest.mark.parametrize("topic", ROWS, ids=lambda t: t.name)
def test_session_records_have_session_id(topic: Topic) -> None:
    if topic.partition_by == "session":
        for name in topic.records:
            assert "session_id" in {field.name for field in dataclasses.fields(class_of(name))}


def test_every_root_record_has_topic() -> None:
    nested = {
        "AnswerDelta", "Backlog", "Candidate", "Capability", "Chunk", "Citation", "CollectionState",
        "EmbedCapability", "EmbedLoad", "Estimate", "Faults", "Grant", "Insert", "KvHandle",
        "Lease", "Load", "Parsing", "Passage",
        "Probes", "Probing", "PromptMessage", "Quoted", "Retrieval", "Sampling",
        "SearchCapability", "SearchLoad", "SearchTally", "StreamDeltas", "StreamEnd",
        "StreamLogprobs", "StreamRetrieved", "StreamStart", "StreamVoid", "Structured",
        "TokenLogprob", "TopLogprob", "WantedPool", "WireError",
    }  # fmt: skip
    assert {name for topic in ROWS for name in topic.records} == set(RECORDS) - nested


def test_check_record_rejects_record_of_other_topic() -> None:
    check_record("fleet", BEAT)
    expected = "topic prefill carries Work or CancelWork or AssignRoles or WarmPrefix, found Heart"
    with pytest.raises(RecordError, match=expected):
        check_record("prefill", BEAT)


@given(st.text(), st.integers(1, 1_000))
def test_partition_of_uses_crc32(key: str, count: int) -> None:
    assert partition_of(key, count) == zlib.crc32(key.encode()) % count


def test_partition_of_matches_pinned_values() -> None:
    assert [partition_of(f"session-{i}", 12) for i in range(6)] == PINNED


PINNED = [0, 10, 0, 6, 5, 11]


def test_dead_letter_topics_have_retention_of_their_topic() -> None:
    """An unreadable prompt once stayed for two weeks."""
    topics = expected_topics(LogSettings())
    for name, topic in TOPICS.items():
        kept_ms = topics[name + DEAD_LETTER_SUFFIX].topic_configs["retention.ms"]
        assert int(kept_ms) == topic.retention_ms
