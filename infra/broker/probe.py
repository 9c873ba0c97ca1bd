"""Asks whether a Kafka broker answers at an address, with one metadata request over a plain socket.

No client library: this runs before any loop does, and a library would retry and log where we want
one answer.
"""

import contextlib
import socket
import struct

_METADATA, _VERSION = 3, 4
_ANSWER_BYTES_MAX = 1 << 20


def broker_answers(bootstrap: str, timeout_s: float = 1.0) -> bool:
    """True if a broker at `host:port` answers and knows at least itself."""
    try:
        with _connect(bootstrap, timeout_s) as connection:
            connection.sendall(_request())
            (size,) = struct.unpack(">i", _exactly(connection, 4))
            if not 12 <= size <= _ANSWER_BYTES_MAX:
                return False
            _correlation, _throttle_ms, brokers = struct.unpack(">iii", _exactly(connection, 12))
            return int(brokers) >= 1
    except OSError:
        return False


def port_is_taken(host: str, port: int) -> bool:
    """True if something listens there already."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


def free_ports(*hosts: str) -> list[int]:
    """A port for each host that nobody listens on at this moment, and no two the same."""
    with contextlib.ExitStack() as held:
        ports = []
        for host in hosts:
            probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            probe.bind((host, 0))
            ports.append(int(probe.getsockname()[1]))
        return ports


def _connect(bootstrap: str, timeout_s: float) -> socket.socket:
    host, _, port = bootstrap.split(",")[0].strip().rpartition(":")
    if not port.isdecimal():
        raise OSError(f"expected host:port, found {bootstrap!r}")
    return socket.create_connection((host, int(port)), timeout=timeout_s)


def _request() -> bytes:
    client = b"trivium-probe"
    header = struct.pack(">hhih", _METADATA, _VERSION, 1, len(client)) + client
    body = struct.pack(">i?", 0, False)  # no topics, and create none
    return struct.pack(">i", len(header) + len(body)) + header + body


def _exactly(connection: socket.socket, count: int) -> bytes:
    chunks = b""
    while len(chunks) < count:
        chunk = connection.recv(count - len(chunks))
        if not chunk:
            raise ConnectionError("the connection closed before the answer was whole")
        chunks += chunk
    return chunks
