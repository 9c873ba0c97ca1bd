"""`trivium trace` as people and scripts call it."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.infra.cli.trivium_runner import trivium_here
from tests.infra.traces.samples import AZURE, MOONCAKE, request_end, written


class _Gateway(BaseHTTPRequestHandler):
    """Serves a model that says two words, but nothing to prompts of 300 tokens."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.headers["Authorization"] == "Bearer wrong":
            error = {"code": "invalid_api_key", "message": "no such key"}
            self._answer(401, json.dumps({"error": error}))
            return
        self._answer(200, json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = len(body["prompt"])
        if tokens == 300:
            error = {"code": "context_length_exceeded", "message": "too long"}
            self._answer(400, json.dumps({"error": error}))
            return
        used = {"prompt_tokens": tokens, "completion_tokens": body["max_tokens"]}
        events: list[dict[str, Any]] = [{"choices": [{"text": text}]} for text in (" a", " b")]
        events.append({"choices": [], "usage": used})
        self._answer(
            200, "".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n"
        )

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def gateway() -> Iterator[str]:
    """Its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Gateway) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


def test_trace_convert_writes_mooncake_file(tmp_path: Path) -> None:
    source, target = tmp_path / "azure.csv", tmp_path / "trace.jsonl"
    source.write_text(AZURE)
    code, output, errors = trivium_here(
        "trace", "convert", str(source), str(target), "--to", "mooncake", "--requests", "1"
    )
    assert code == 0, errors
    assert output == f"{target}: 1 requests as mooncake\n"
    expected = {"timestamp": 0, "input_length": 4_808, "output_length": 10, "hash_ids": []}
    assert json.loads(target.read_text()) == expected


def test_trace_show_reports_skipped_lines(tmp_path: Path) -> None:
    tool = {"schema": "dynamo.request.trace.v1", "event_type": "tool_end"}
    source = written(tmp_path, [request_end(0), tool])
    code, output, _ = trivium_here("trace", "show", str(source))
    assert code == 0
    assert "dynamo: 1 requests in 0 s, 0 sessions; left out: 1 tool_end" in output


def test_trace_show_prints_summary(tmp_path: Path) -> None:
    source = written(tmp_path, MOONCAKE)
    code, output, errors = trivium_here("trace", "show", str(source))
    assert code == 0, errors
    for words in ("mooncake: 3 requests", "before: 31.0%", "prompt_tokens", "█"):
        assert words in output
    code, output, _ = trivium_here("trace", "show", str(source), "--json")
    assert json.loads(output)["requests"] == 3


def test_trace_send_reports_latencies_and_errors(gateway: str, tmp_path: Path) -> None:
    source = written(tmp_path, MOONCAKE)
    command = ("trace", "send", str(source), "--url", gateway, "--speed", "max")
    code, output, errors = trivium_here(*command, "--requests", "2", "--json")
    assert code == 0, errors
    report = json.loads(output)
    assert (report["total_isl"]["avg"], report["total_osl"]["avg"]) == (3_000, 78)
    assert report["time_to_first_token"]["count"] == report["request_count"]["avg"] == 2
    code, output, _ = trivium_here(*command)
    assert code == 1
    assert "answers: 2, errors: 1\n  1 context_length_exceeded" in output
    assert "inter_token_latency" in output
    code, output, _ = trivium_here(*command, "--scale", "0.5", "--json")
    assert json.loads(output)["total_isl"]["avg"] == 1_650


def test_trace_send_reports_rejected_api_key(gateway: str, tmp_path: Path) -> None:
    source = written(tmp_path, MOONCAKE)
    command = ("trace", "send", str(source), "--url", gateway)
    code, output, errors = trivium_here(*command, "--api-key", "wrong")
    assert (code, output) == (2, "")
    assert "401: no such key" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("convert", "a.csv", "b", "--to", "csv"), "--to: expected mooncake, dynamo, aiperf"),
        (("show", "away.csv"), "away.csv: no such file or directory"),
        (("show", "bad.csv"), "bad.csv:1: expected a trace: Azure's CSV"),
        (("send", "a.csv", "--speed", "0"), "--speed: expected a factor above 0, max or closed"),
        (("send", "a.csv", "--speed", "fast"), "found 'fast'"),
        (("send", "a.csv", "--url", "http://127.0.0.1:9"), "no gateway at http://127.0.0.1:9"),
        (("send", "a.csv", "--url", "here"), "--url: expected one such as http://"),
    ],
)
def test_trace_command_rejects_bad_arguments(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text(AZURE)
    (tmp_path / "bad.csv").write_text("x")
    code, output, errors = trivium_here("trace", *arguments)
    assert (code, output) == (2, "")
    assert message in errors
