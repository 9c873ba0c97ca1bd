"""A Confluent-compatible schema registry in one thread of the test process.

Knows subjects, versions, ids, per-subject compatibility, and refuses a schema that adds a field
without a default to a subject that has versions. Keeps what it was asked, for tests to look at.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote
from uuid import UUID


class StubRegistry:
    """State of the stub: what is registered, and the calls so far."""

    def __init__(self) -> None:
        self.url = ""
        self.schemas: list[str] = []  # id - 1 is the index
        self.subjects: dict[str, list[int]] = {}
        self.compatibility: dict[str, str] = {}
        self.calls: list[str] = []
        self.authorizations: set[str | None] = set()
        self.answer_instead: tuple[int, bytes] | None = None

    def answer(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        self.calls.append(f"{method} {path}")
        if method == "PUT" and (match := re.fullmatch(r"/config/([^/]+)", path)) and body:
            self.compatibility[unquote(match[1])] = body["compatibility"]
            return 200, body
        if path == "/subjects":
            return 200, list(self.subjects)
        if match := re.fullmatch(r"/subjects/([^/]+)/versions", path):
            subject = unquote(match[1])
            if method == "GET":
                if subject not in self.subjects:
                    return 404, {"error_code": 40401, "message": "Subject not found"}
                return 200, list(range(1, len(self.subjects[subject]) + 1))
            return self._register(subject, (body or {})["schema"])
        if match := re.fullmatch(r"/subjects/([^/]+)/versions/(\d+)", path):
            schema_id = self.subjects[unquote(match[1])][int(match[2]) - 1]
            return 200, {"id": schema_id, "schema": self.schemas[schema_id - 1]}
        if match := re.fullmatch(r"/schemas/guids/([0-9a-f-]+)", path):
            path = f"/schemas/ids/{UUID(match[1]).int}"
        if match := re.fullmatch(r"/schemas/ids/(\d+)", path):
            index = int(match[1]) - 1
            if 0 <= index < len(self.schemas):
                return 200, {"schema": self.schemas[index]}
            return 404, {"error_code": 40403, "message": "Schema not found"}
        return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}

    def _register(self, subject: str, text: str) -> tuple[int, Any]:
        versions = self.subjects.setdefault(subject, [])
        if text not in self.schemas:
            if any(not self._reads(text, self.schemas[old - 1]) for old in versions):
                return 409, {
                    "error_code": 409,
                    "message": "Schema being registered is incompatible",
                }
            self.schemas.append(text)
        schema_id = self.schemas.index(text) + 1
        if schema_id not in versions:
            versions.append(schema_id)
        return 200, {"id": schema_id, "guid": str(UUID(int=schema_id))}

    def _reads(self, new: str, old: str) -> bool:
        old_names = {field["name"] for field in json.loads(old)["fields"]}
        fields = json.loads(new)["fields"]
        return all("default" in field for field in fields if field["name"] not in old_names)


def _handler(stub: StubRegistry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            stub.authorizations.add(self.headers.get("Authorization"))
            path = self.path.partition("?")[0]  # some clients say more than we know of
            status, answer = stub.answer(self.command, path, body)
            data = json.dumps(answer).encode()
            if stub.answer_instead is not None:
                status, data = stub.answer_instead
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = _serve  # names of the base class

        def log_message(self, format: str, *args: object) -> None:
            """Silence."""

    return Handler


@contextmanager
def running_registry() -> Iterator[StubRegistry]:
    """The stub on a free port of the loopback interface."""
    stub = StubRegistry()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(stub))
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
