"""A small client of a Confluent-compatible schema registry, used once at start.

It registers the schemas of the topic table, one subject per topic and record
(TopicRecordNameStrategy), asks for transitive backward compatibility, and fetches older versions so
that the codec can read them. Nothing on the path calls it: when it is done, ids are in the codec.
"""

import base64
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, cast

from schemas.codec import Codec, Schema, full_schema
from schemas.errors import BrokerUnavailable, ConfigError
from schemas.settings import LogSettings
from schemas.topics import TOPICS

COMPATIBILITY = "BACKWARD_TRANSITIVE"
CONTENT_TYPE = "application/vnd.schemaregistry.v1+json"


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
        """The schema's id under the subject; the same id again where it is already there."""
        what = f"schema of {subject}"
        name = urllib.parse.quote(subject, safe="")
        self._call("PUT", f"/config/{name}", {"compatibility": COMPATIBILITY}, what)
        body = {"schemaType": "AVRO", "schema": json.dumps(schema)}
        return int(self._call("POST", f"/subjects/{name}/versions", body, what)["id"])

    def fetch(self, schema_id: int) -> Schema:
        """The schema that an id stands for."""
        answer = self._call("GET", f"/schemas/ids/{schema_id}", None, f"schema id {schema_id}")
        return cast(Schema, json.loads(answer["schema"]))

    def versions(self, subject: str) -> dict[int, Schema]:
        """Every version that the registry holds of a subject, by schema id."""
        what = f"versions of {subject}"
        path = f"/subjects/{urllib.parse.quote(subject, safe='')}/versions"
        schemas = {}
        for number in self._call("GET", path, None, what):
            version = self._call("GET", f"{path}/{number}", None, what)
            schemas[int(version["id"])] = cast(Schema, json.loads(version["schema"]))
        return schemas

    def _call(self, method: str, path: str, body: dict[str, Any] | None, what: str) -> Any:
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
            raise ConfigError(
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
    """Every subject of the topic table and the record that it holds."""
    return {
        f"{prefix}{topic.name}-trivium.{record}": record
        for topic in TOPICS.values()
        for record in topic.records
    }


def register_all(url: str, *, prefix: str = "", timeout_ms: int = 5_000) -> dict[str, int]:
    """Register the schemas of all topics; returns record name to id.

    Raises ConfigError where the registry refuses a schema as incompatible with what it holds, and
    BrokerUnavailable where it does not answer.
    """
    registry = Registry(url, timeout_ms=timeout_ms)
    ids: dict[str, int] = {}
    for subject, record in subjects(prefix).items():
        ids.setdefault(record, registry.register(subject, full_schema(record)))
    return ids


def make_codec(settings: LogSettings) -> Codec:
    """The codec that the settings ask for; with a registry, every version that it holds reads."""
    if not settings.schema_registry:
        return Codec()
    url, timeout_ms = settings.schema_registry, settings.request_timeout_ms
    codec = Codec(register_all(url, prefix=settings.topic_prefix, timeout_ms=timeout_ms))
    registry = Registry(url, timeout_ms=timeout_ms)
    for subject in subjects(settings.topic_prefix):
        for schema_id, schema in registry.versions(subject).items():
            codec.learn(schema_id, schema)
    return codec
