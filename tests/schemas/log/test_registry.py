"""The schema registry client against a stub, and the codec that comes out of it."""

import dataclasses
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from schemas.codec import Codec, full_schema
from schemas.errors import BrokerUnavailable, ConfigError
from schemas.log.registry import NotRegistered, Registry, make_codec, register_all, subjects
from schemas.records import Cancellation, CancelReason, Reason, WireError
from schemas.settings import LogSettings
from schemas.topics import TOPICS
from tests.schemas.examples import example
from tests.schemas.log.registry_stub import StubRegistry, running_registry

CANCELLATION = Cancellation(
    request_id="r1", session_id="s1", reason=CancelReason.CLIENT_GONE, at_ms=5
)
PATIENT: Any = {"timeout_ms": 60_000}  # for stalls: the stub is a thread of this process


@pytest.fixture
def stub() -> Iterator[StubRegistry]:
    with running_registry() as found:
        yield found


def test_subjects_follow_the_topic_or_topic_and_record() -> None:
    """Kafka's default name where a topic has one kind of record."""
    found = subjects("dev.")
    assert found["dev.requests-value"] == "Request" and found["dev.prompts-value"] == "Prompt"
    assert found["dev.prefill-trivium.Work"] == found["dev.decode-trivium.Work"] == "Work"
    assert set(found.values()) == {name for t in TOPICS.values() for name in t.records}


def test_every_record_gets_an_id(stub: StubRegistry) -> None:
    ids = register_all(stub.url, prefix="dev.", **PATIENT)
    assert set(ids) == set(subjects("dev.")) == set(stub.subjects)
    assert len(set(ids.values())) == len(set(subjects().values()))
    assert set(stub.compatibility.values()) == {"BACKWARD_TRANSITIVE"}
    assert set(stub.compatibility) == set(stub.subjects)
    work = stub.schemas[ids["dev.decode-trivium.Work"] - 1]
    assert json.loads(work) == full_schema("Work")


def test_registering_again_gives_the_same_ids(stub: StubRegistry) -> None:
    assert register_all(stub.url, **PATIENT) == register_all(stub.url, **PATIENT)
    assert all(len(versions) == 1 for versions in stub.subjects.values())


def test_fetch_gives_the_schema(stub: StubRegistry) -> None:
    ids = register_all(stub.url, **PATIENT)
    registry = Registry(stub.url, **PATIENT)
    assert registry.fetch(ids["phases-trivium.Phase"]) == full_schema("Phase")
    why = "schema id 999: the schema registry at .* answered 404"
    with pytest.raises(NotRegistered, match=why):
        registry.fetch(999)


def test_only_schemas_of_avro_are_read(stub: StubRegistry) -> None:
    """Of JSON there is none to read with; others are refused."""
    registry = Registry(stub.url, **PATIENT)
    stub.answer_instead = (200, b'{"schemaType": "JSON", "schema": "{}"}')
    assert registry.fetch(1) is None
    stub.answer_instead = (200, b'{"schemaType": "PROTOBUF", "schema": "syntax"}')
    with pytest.raises(ConfigError, match="schema id 1: expected one of Avro or JSON"):
        registry.fetch(1)


def test_what_is_not_registered_has_no_versions(stub: StubRegistry) -> None:
    assert Registry(stub.url, **PATIENT).versions("nobody's") == []


@pytest.mark.parametrize("subject", ["dev.decisions-value", "dev.decisions-trivium.Decision"])
def test_the_codec_writes_registered_ids_and_reads_older_versions(
    subject: str, stub: StubRegistry
) -> None:
    """Also where they were registered when all subjects had the record's name."""
    current = full_schema("Decision")
    older = {**current, "fields": current["fields"][:-1]}  # before policies' reasons were told
    old_id = Registry(stub.url, **PATIENT).register(subject, older)
    log = LogSettings(schema_registry=stub.url, topic_prefix="dev.", request_timeout_ms=60_000)
    codec = make_codec(log)
    decision = dataclasses.replace(example("trivium.Decision"), policy_reason=Reason.UNKNOWN)
    value = codec.encode(decision)
    assert value[0] == 0 and codec.decode(value) == decision
    assert json.loads(stub.schemas[value[4] - 1]) == current
    old_value = bytes([0, 0, 0, 0, old_id]) + value[5:-1]  # without that
    assert codec.decode(old_value) == decision


def test_without_a_registry_the_codec_is_plain(stub: StubRegistry) -> None:
    assert make_codec(LogSettings()).encode(CANCELLATION) == Codec().encode(CANCELLATION)
    assert stub.calls == []


def test_incompatible_schemas_stop_the_start(stub: StubRegistry) -> None:
    schema = {**full_schema("Outcome"), "fields": full_schema("Outcome")["fields"][:1]}
    Registry(stub.url, **PATIENT).register("outcomes-value", schema)
    with pytest.raises(ConfigError, match="outcomes-value: .*answered 409.*incompat"):
        register_all(stub.url, **PATIENT)


def test_credentials_become_basic_authentication(stub: StubRegistry) -> None:
    url = stub.url.replace("http://", "http://me:p%40ss@")
    Registry(url, **PATIENT).register("x", full_schema("WireError"))
    assert stub.authorizations == {"Basic bWU6cEBzcw=="}
    stub.answer_instead = (401, b"no")
    with pytest.raises(ConfigError, match="answered 401: no") as caught:
        Registry(url, **PATIENT).fetch(1)
    assert "p%40ss" not in str(caught.value) and "p@ss" not in str(caught.value)


def test_an_answer_that_is_no_json_is_refused(stub: StubRegistry) -> None:
    stub.answer_instead = (200, b"<html>")
    with pytest.raises(ConfigError, match="expected JSON from the schema registry"):
        Registry(stub.url, **PATIENT).fetch(1)


def test_an_absent_registry_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"  # ours, and nobody listens there
        with pytest.raises(BrokerUnavailable, match=rf"no schema registry at {url}"):
            register_all(url)


@pytest.mark.parametrize("url", ["registry:8081", "ftp://registry", "http://"])
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected an http or https URL"):
        Registry(url)


def test_ids_of_other_versions_of_a_record_read(stub: StubRegistry) -> None:
    ids = register_all(stub.url, **PATIENT)
    codec = Codec({record: ids[subject] for subject, record in subjects().items()})
    schema = {**full_schema("WireError"), "fields": full_schema("WireError")["fields"][:2]}
    codec.learn(77, schema)
    assert codec.decode(b"\x00\x00\x00\x00\x4d\x02a\x02b") == WireError(code="a", message="b")
