"""A small client of a Confluent-compatible schema registry, used once at start.

It registers the schemas of the topic table under the subjects of `Topic.subject`, requests
transitive backward compatibility, and fetches older versions so that the codec can read them.
Nothing on the hot path calls it: after the start, the codec has the ids. Bridges fetch the schemas
of other producers' prompts, each once.
"""

import base64
import json
import urllib.parse
from http import HTTPStatus
from typing import Any, NamedTuple, cast
from uuid import UUID

from schemas.codec import Codec, Schema, full_schema
from schemas.errors import BrokerUnavailable, ConfigError
from schemas.settings import LogSettings
from schemas.topics import TOPICS

COMPATIBILITY = "BACKWARD_TRANSITIVE"
CONTENT_TYPE = "application/vnd.schemaregistry.v1+json"
SchemaId = int | UUID  # unique in one registry, or Confluent's globally unique id


class NotRegistered(ConfigError):
    """The registry has no such subject, version or id."""


class SchemaVersion(NamedTuple):
    """One version of a subject."""

    number: int
    schema_id: int
    schema: Schema


class Registry:
    """One registry by its URL; credentials in the URL become basic authentication."""

    def __init__(self, url: str, *, timeout_ms: int = 5_000) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                "log.schema_registry: expected an http or https URL, found scheme "
                f"{parts.scheme!r} and host {parts.hostname!r}"
            )
        place = parts.hostname + (f":{parts.port}" if parts.port else "")
        self.url = f"{parts.scheme}://{place}{parts.path.rstrip('/')}"
        self._timeout_s = timeout_ms / 1000
        self._headers = {"Accept": CONTENT_TYPE, "Content-Type": CONTENT_TYPE}
        if parts.username is not None:
            secret = ":".join(map(urllib.parse.unquote, (parts.username, parts.password or "")))
            self._headers["Authorization"] = "Basic " + base64.b64encode(secret.encode()).decode()

    def register(self, subject: str, schema: Schema) -> int:
        """Register a schema under the subject; return its id, the same one if it exists already."""
        what = f"schema of {subject}"
        name = urllib.parse.quote(subject, safe="")
        self._call("PUT", f"/config/{name}", {"compatibility": COMPATIBILITY}, what)
        body = {"schemaType": "AVRO", "schema": json.dumps(schema)}
        return int(self._call("POST", f"/subjects/{name}/versions", body, what)["id"])

    def fetch(self, schema_id: SchemaId) -> Schema | None:
        """Return the Avro schema of an id; None if it is a JSON schema.

        Raises NotRegistered if the registry has no such id. Results are not cached: callers that
        read records by their ids cache them.
        """
        what = f"schema id {schema_id}"
        kind = "guids" if isinstance(schema_id, UUID) else "ids"
        answer = self._call("GET", f"/schemas/{kind}/{schema_id}", None, what)
        kind = answer.get("schemaType", "AVRO")
        if kind == "JSON":
            return None
        if kind != "AVRO":
            raise ConfigError(f"{what}: expected one of Avro or JSON, found {kind}")
        return cast(Schema, json.loads(answer["schema"]))

    def subjects(self) -> set[str]:
        """Return every subject that the registry has."""
        return set(self._call("GET", "/subjects", None, "subjects"))

    def versions(self, subject: str) -> list[SchemaVersion]:
        """Return every version of a subject, oldest first; none if the registry has no such
        subject."""
        what = f"versions of {subject}"
        path = f"/subjects/{urllib.parse.quote(subject, safe='')}/versions"
        try:
            numbers = self._call("GET", path, None, what)
        except NotRegistered:
            return []
        answers = [self._call("GET", f"{path}/{number}", None, what) for number in sorted(numbers)]
        return [
            SchemaVersion(number, int(answer["id"]), cast(Schema, json.loads(answer["schema"])))
            for number, answer in zip(sorted(numbers), answers, strict=True)
        ]

    def _call(self, method: str, path: str, body: dict[str, Any] | None, what: str) -> Any:
        import urllib.error  # with an HTTP client, which few deployments need
        import urllib.request

        data = None if body is None else json.dumps(body).encode()
        call = urllib.request.Request(
            self.url + path, data=data, headers=self._headers, method=method
        )
        try:
            with urllib.request.urlopen(call, timeout=self._timeout_s) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read(2_000).decode(errors="replace")
            kind = NotRegistered if error.code == HTTPStatus.NOT_FOUND else ConfigError
            raise kind(
                f"{what}: the schema registry at {self.url} answered {error.code}: {text}"
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"{what}: expected JSON from the schema registry at {self.url}: {error}"
            ) from error
        except OSError as error:
            raise BrokerUnavailable(
                f"{what}: no schema registry at {self.url} (log.schema_registry): {error}"
            ) from error


def subjects(prefix: str = "") -> dict[str, str]:
    """Return every subject of the topic table, with the name of its record."""
    return {
        prefix + topic.subject(record): record
        for topic in TOPICS.values()
        for record in topic.records
    }


def _former_subjects(prefix: str) -> set[str]:
    """Return the former names of all subjects: records in the log may have ids of these."""
    return {
        f"{prefix}{topic.name}-trivium.{record}"
        for topic in TOPICS.values()
        for record in topic.records
    }


def register_all(url: str, *, prefix: str = "", timeout_ms: int = 5_000) -> dict[str, int]:
    """Register the schemas of all topics; return their ids by subject.

    Raises ConfigError if the registry refuses a schema as incompatible with older versions, and
    BrokerUnavailable if it does not answer.
    """
    registry = Registry(url, timeout_ms=timeout_ms)
    return {
        subject: registry.register(subject, full_schema(record))
        for subject, record in subjects(prefix).items()
    }


def make_codec(settings: LogSettings) -> Codec:
    """Return the codec for the settings; with a registry, it reads every registered version."""
    if not settings.schema_registry:
        return Codec()
    url, timeout_ms = settings.schema_registry, settings.request_timeout_ms
    prefix = settings.topic_prefix
    ids = register_all(url, prefix=prefix, timeout_ms=timeout_ms)
    by_subject = subjects(prefix)
    codec = Codec({by_subject[subject]: schema_id for subject, schema_id in ids.items()})
    registry = Registry(url, timeout_ms=timeout_ms)
    for subject in sorted((by_subject.keys() | _former_subjects(prefix)) & registry.subjects()):
        for version in registry.versions(subject):
            codec.learn(version.schema_id, version.schema)
    return codec
