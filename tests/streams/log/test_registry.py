"""The schema registry client against a stub, and the codec that comes out of it."""

import dataclasses
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from schemas.codec import Codec, full_schema
from schemas.errors import BrokerUnavailable, ConfigError
from schemas.records import Cancellation, CancelReason, Reason, WireError
from schemas.settings import LogSettings
from schemas.topics import TOPICS
from streams.log.registry import NotRegistered, Registry, make_codec, register_all, subjects
from tests.schemas.examples import example
from tests.streams.log.registry_stub import StubRegistry, running_registry

CANCELLATION = Cancellation(
    request_id="r1", session_id="s1", reason=CancelReason.CLIENT_GONE, at_ms=5
)
PATIENT: Any = {"timeout_ms": 60_000}  # for stalls: the stub is a thread of this process


@pytest.fixture
def stub() -> Iterator[StubRegistry]:
    with running_registry() as registry:
        yield registry


def test_registry_subjects_name_topic_or_topic_and_record() -> None:
    """A topic with one kind of record has Kafka's default subject name."""
    records = subjects("dev.")
    assert records["dev.requests-value"] == "Request" and records["dev.prompts-value"] == "Prompt"
    assert records["dev.prefill-trivium.Work"] == records["dev.decode-trivium.Work"] == "Work"
    assert set(records.values()) == {name for t in TOPICS.values() for name in t.records}


def test_register_all_gives_id_to_every_record(stub: StubRegistry) -> None:
    ids = register_all(stub.url, prefix="dev.", **PATIENT)
    assert set(ids) == set(subjects("dev.")) == set(stub.subjects)
    assert len(set(ids.values())) == len(set(subjects().values()))
    assert set(stub.compatibility.values()) == {"BACKWARD_TRANSITIVE"}
    assert set(stub.compatibility) == set(stub.subjects)
    work = stub.schemas[ids["dev.decode-trivium.Work"] - 1]
    assert json.loads(work) == full_schema("Work")


def test_repeated_registration_gives_same_ids(stub: StubRegistry) -> None:
    assert register_all(stub.url, **PATIENT) == register_all(stub.url, **PATIENT)
    assert all(len(versions) == 1 for versions in stub.subjects.values())


def test_registry_fetch_returns_schema(stub: StubRegistry) -> None:
    ids = register_all(stub.url, **PATIENT)
    registry = Registry(stub.url, **PATIENT)
    assert registry.fetch(ids["phases-trivium.Phase"]) == full_schema("Phase")
    why = "schema id 999: the schema registry at .* answered 404"
    with pytest.raises(NotRegistered, match=why):
        registry.fetch(999)


def test_registry_fetch_rejects_other_schema_types(stub: StubRegistry) -> None:
    """A JSON schema gives nothing to read with; other types are refused."""
    registry = Registry(stub.url, **PATIENT)
    stub.answer_instead = (200, b'{"schemaType": "JSON", "schema": "{}"}')
    assert registry.fetch(1) is None
    stub.answer_instead = (200, b'{"schemaType": "PROTOBUF", "schema": "syntax"}')
    with pytest.raises(ConfigError, match="schema id 1: expected one of Avro or JSON"):
        registry.fetch(1)


def test_unregistered_subject_has_no_versions(stub: StubRegistry) -> None:
    assert Registry(stub.url, **PATIENT).versions("nobody's") == []


@pytest.mark.parametrize("subject", ["dev.decisions-value", "dev.decisions-trivium.Decision"])
def test_codec_writes_registered_ids_and_reads_older_versions(
    subject: str, stub: StubRegistry
) -> None:
    """Older versions may be registered under a subject with the record's name."""
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


def test_codec_without_registry_uses_plain_framing(stub: StubRegistry) -> None:
    assert make_codec(LogSettings()).encode(CANCELLATION) == Codec().encode(CANCELLATION)
    assert stub.calls == []


def test_register_all_rejects_incompatible_schema(stub: StubRegistry) -> None:
    schema = {**full_schema("Outcome"), "fields": full_schema("Outcome")["fields"][:1]}
    Registry(stub.url, **PATIENT).register("outcomes-value", schema)
    with pytest.raises(ConfigError, match="outcomes-value: .*answered 409.*incompat"):
        register_all(stub.url, **PATIENT)


def test_registry_sends_url_credentials_as_basic_authentication(stub: StubRegistry) -> None:
    url = stub.url.replace("http://", "http://me:p%40ss@")
    Registry(url, **PATIENT).register("x", full_schema("WireError"))
    assert stub.authorizations == {"Basic bWU6cEBzcw=="}
    stub.answer_instead = (401, b"no")
    with pytest.raises(ConfigError, match="answered 401: no") as caught:
        Registry(url, **PATIENT).fetch(1)
    assert "p%40ss" not in str(caught.value) and "p@ss" not in str(caught.value)


def test_registry_rejects_answer_without_json(stub: StubRegistry) -> None:
    stub.answer_instead = (200, b"<html>")
    with pytest.raises(ConfigError, match="expected JSON from the schema registry"):
        Registry(stub.url, **PATIENT).fetch(1)


def test_missing_registry_error_names_url() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"  # ours, and nobody listens there
        with pytest.raises(BrokerUnavailable, match=rf"no schema registry at {url}"):
            register_all(url)


@pytest.mark.parametrize("url", ["registry:8081", "ftp://registry", "http://"])
def test_registry_rejects_invalid_url(url: str) -> None:
    with pytest.raises(ConfigError, match="expected an http or https URL"):
        Registry(url)


def test_codec_reads_learned_schema_id(stub: StubRegistry) -> None:
    ids = register_all(stub.url, **PATIENT)
    codec = Codec({record: ids[subject] for subject, record in subjects().items()})
    schema = {**full_schema("WireError"), "fields": full_schema("WireError")["fields"][:2]}
    codec.learn(77, schema)
    assert codec.decode(b"\x00\x00\x00\x00\x4d\x02a\x02b") == WireError(code="a", message="b")
