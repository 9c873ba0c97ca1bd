"""Who listens where, from the kernel's table of sockets."""

import contextlib
import os
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

_LISTENING = "0A"
_TABLES = {"tcp": True, "tcp6": True, "udp": False, "udp6": False}  # whether states say it


def listening_sockets(pid: int) -> set[tuple[str, IPv4Address | IPv6Address]]:
    """Return protocol and address of each socket on which a process listens."""
    own_sockets = {_target(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    endpoints = set()
    for table, has_state in _TABLES.items():
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if f"socket:[{inode}]" in own_sockets and (state == _LISTENING or not has_state):
                endpoints.add((table, _address(local.partition(":")[0])))
    return endpoints


def _target(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return os.readlink(path)
    return ""


def _address(text: str) -> IPv4Address | IPv6Address:
    """Decode an address, which the kernel writes in 32-bit words of this machine's order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return ip_address(b"".join(words))
