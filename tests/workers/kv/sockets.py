"""Who listens where, from the kernel's table of sockets."""

import contextlib
import os
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

_LISTENING = "0A"
_TABLES = {"tcp": True, "tcp6": True, "udp": False, "udp6": False}  # whether states say it


def listening(pid: int) -> set[tuple[str, IPv4Address | IPv6Address]]:
    """Protocol and address of each socket on which a process takes what comes."""
    mine = {_target(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    found = set()
    for table, has_state in _TABLES.items():
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if f"socket:[{inode}]" in mine and (state == _LISTENING or not has_state):
                found.add((table, _address(local.partition(":")[0])))
    return found


def _target(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return os.readlink(path)
    return ""


def _address(text: str) -> IPv4Address | IPv6Address:
    """The kernel writes 32-bit words as this machine's integers."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return ip_address(b"".join(words))
