"""Two hosts on one machine: network namespaces joined by a cable (a veth pair) that can be cut.

This thread's sockets are on the first while they exist. Processes run on a host by `command`: UCX
looks for devices in /sys, which is another one on each. Their addresses exist nowhere else.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

HERE, THERE = "10.213.7.1", "10.213.7.2"
DEVICE = "cable0"
_NEW_NETWORK = 0x40000000
_KEEP = "mount -t sysfs sysfs /sys && echo && exec cat"
_libc = ctypes.CDLL(None, use_errno=True)


class Hosts:
    """Both, by the processes that keep them."""

    def __init__(self, first: int, second: int) -> None:
        self.first, self.second = first, second

    def command(self, host: int, *command: str) -> tuple[str, ...]:
        """The command line that runs this on a host."""
        namespaces = f"/proc/{host}/ns"
        return ("nsenter", f"--net={namespaces}/net", f"--mount={namespaces}/mnt", *command)

    def cable(self, state: str) -> None:
        """`down` cuts it, `up` mends it."""
        _run(*self.command(self.second, "ip", "link", "set", DEVICE, state))

    def join(self) -> None:
        """Lay the cable, and give both ends their addresses."""
        ends = (DEVICE, "netns", str(self.first), "type", "veth", "peer", "name", DEVICE)
        _run("ip", "link", "add", *ends, "netns", str(self.second))
        for keeper, address in ((self.first, HERE), (self.second, THERE)):
            inside = self.command(keeper, "ip")
            _run(*inside, "address", "add", f"{address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _run(*inside, "link", "set", device, "up")


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Skips the test, with a sentence, where namespaces are not allowed."""
    for tool in ("ip", "nsenter", "unshare"):
        if shutil.which(tool) is None:
            pytest.skip(f"the program {tool} is missing: two hosts cannot be played")
    with ExitStack() as stack:
        first, second = stack.enter_context(_network()), stack.enter_context(_network())
        hosts = Hosts(first, second)
        try:
            hosts.join()
        except OSError as error:
            pytest.skip(f"network namespaces are not allowed here: {error}")
        stack.enter_context(_inside(first))
        yield hosts


@contextmanager
def _network() -> Iterator[int]:
    """A namespace of its own, and the process that keeps it."""
    keeper = subprocess.Popen(
        ["unshare", "--net", "--mount", "sh", "-c", _KEEP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    try:
        if not keeper.stdout.readline():
            pytest.skip("network namespaces are not allowed here; root may make them")
        yield keeper.pid
    finally:
        keeper.communicate()


@contextmanager
def _inside(keeper: int) -> Iterator[None]:
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    within = os.open(Path("/proc", str(keeper), "ns", "net"), os.O_RDONLY | os.O_CLOEXEC)
    try:
        _enter(within)
        yield
    finally:
        _enter(before)
        os.close(within)
        os.close(before)


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "setns")


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise OSError(f"{' '.join(command)}: {result.stderr.strip()}")
