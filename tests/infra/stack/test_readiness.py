"""When a gateway says that it takes calls."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

from infra.stack.readiness import is_served


@contextmanager
def answering(status: int) -> Iterator[str]:
    """A gateway that answers every call with this status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing on the test's output."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_readiness_check_asks_gateway_over_http() -> None:
    answers = {}
    for status in (503, 200):
        with answering(status) as url:
            answers[status] = asyncio.run(is_served(url))
    assert answers == {503: False, 200: True}
    assert asyncio.run(is_served("http://127.0.0.1:1")) is False
