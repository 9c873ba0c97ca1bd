"""Asks which Kafka cluster answers at an address, and reserves ports among stacks.

It sends one metadata request over a plain socket. It needs no client library: it runs before any
event loop, and a library would retry and log where one answer is needed. Of two stacks that start
at the same moment on one port, only one gets the reservation; the other fails at once.
"""

import contextlib
import socket
import struct

_METADATA, _VERSION = 3, 4
_ANSWER_BYTES_MAX = 1 << 20
_HEAD = struct.Struct(">iii")  # correlation id, throttle time in ms, and number of brokers


def broker_answers(bootstrap: str, timeout_s: float = 1.0) -> bool:
    """Return whether a broker at `host:port` answers and lists at least itself."""
    return cluster_of(bootstrap, timeout_s) is not None


def cluster_of(bootstrap: str, timeout_s: float = 1.0) -> str | None:
    """Return the id of the cluster that answers at `host:port` and lists its broker, or None."""
    try:
        with _connect(bootstrap, timeout_s) as connection:
            connection.sendall(_request())
            (size,) = struct.unpack(">i", _receive_exactly(connection, 4))
            if not _HEAD.size <= size <= _ANSWER_BYTES_MAX:
                return None
            return _cluster_id(_receive_exactly(connection, size))
    except (OSError, struct.error, UnicodeDecodeError):
        return None


def reserve_port(host: str, port: int) -> socket.socket | None:
    """Reserve the port for a program that is about to listen there; return None if it is reserved.

    Reservations hold among Trivium's programs on this host, until the socket is closed or its
    process ends. The socket's name is one of Linux's abstract names: like ports, each network
    namespace has its own.
    """
    reservation = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        reservation.bind(f"\0trivium-port-{host}:{port}")
    except OSError:
        reservation.close()
        return None
    return reservation


def port_is_taken(host: str, port: int) -> bool:
    """Return whether something listens on the port already."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


def free_ports(*hosts: str) -> list[int]:
    """Return a different port for each host, on which nothing listens at this moment."""
    with contextlib.ExitStack() as sockets:
        ports = []
        for host in hosts:
            probe = sockets.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
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


def _cluster_id(answer: bytes) -> str | None:
    _correlation, _throttle_ms, brokers = _HEAD.unpack_from(answer)
    at = _HEAD.size
    for _ in range(brokers):
        _host, at = _text(answer, at + 4)  # after the node's id
        _rack, at = _text(answer, at + 4)  # after its port
    return _text(answer, at)[0] if brokers >= 1 else None


def _text(answer: bytes, at: int) -> tuple[str, int]:
    """Return the text at this position, empty for null, and the position of the next field."""
    (size,) = struct.unpack_from(">h", answer, at)
    end = at + 2 + max(0, size)
    return answer[at + 2 : end].decode(), end


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    chunks = b""
    while len(chunks) < count:
        chunk = connection.recv(count - len(chunks))
        if not chunk:
            raise ConnectionError("the connection closed before the answer was whole")
        chunks += chunk
    return chunks
