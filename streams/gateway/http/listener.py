"""The socket at which a gateway takes calls: its own, or one inherited from its launcher.

A launcher, or systemd's socket activation, listens in a gateway's place and passes on `LISTEN_FDS`
sockets, from file 3 on, to the process `LISTEN_PID`. So calls that come while no gateway runs wait
in the socket's backlog and are not refused. This module imports no HTTP, because the launcher needs
only this.
"""

import os
import socket

from schemas.errors import ConfigError

BACKLOG = 2_048
LISTEN_FILE = 3
LISTEN_NAMES = ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; calls wait in its backlog until they are accepted.

    Raises ConfigError if the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"gateway.host, gateway.port: {host}:{port} cannot be bound: {error}; "
            "choose another port"
        ) from error
    listener.setblocking(False)
    return listener


def inherit_listener() -> socket.socket | None:
    """Return the inherited socket, once, or None without one; raises ConfigError for an unusable
    one."""
    variables = {name: os.environ.pop(name, "") for name in LISTEN_NAMES}
    if variables["LISTEN_PID"] != str(os.getpid()):
        return None
    if variables["LISTEN_FDS"] != "1":
        raise ConfigError(
            f"LISTEN_FDS: expected 1 socket, found {variables['LISTEN_FDS'] or 'none'}"
        )
    try:
        listener = socket.socket(fileno=LISTEN_FILE)
        is_listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ConfigError(f"LISTEN_FDS: file {LISTEN_FILE} is no socket: {error}") from error
    if not is_listening or listener.family not in (socket.AF_INET, socket.AF_INET6):
        raise ConfigError(f"LISTEN_FDS: expected a listening TCP socket, found {listener}")
    listener.set_inheritable(False)
    listener.setblocking(False)
    return listener
