"""Runs a command that ends with its parent: `python tether.py PARENT_PID LISTENER COMMAND...`.

The kernel sends SIGTERM to the command when the thread that started it dies, so no child outlives a
launcher that was killed. This is a separate script, since a hook between fork and exec is unsafe in
programs with threads. A LISTENER other than -1 is the number of a socket, which the command gets as
from systemd: as file 3, with the command's process id in `LISTEN_PID`. The script imports none of
our modules, so that it starts in milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_LISTEN_FILE = 3


def tethered(*command: str, listener: int = -1) -> list[str]:
    """Return the command line of a process that ends with the thread that starts it."""
    return [sys.executable, "-IS", __file__, str(os.getpid()), str(listener), *command]


def main() -> None:
    """Request the signal, check that the parent is still alive, and execute the command."""
    parent, listener, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the launcher ended before its process began")
    if listener >= 0:
        os.dup2(listener, _LISTEN_FILE)
        os.set_inheritable(_LISTEN_FILE, True)  # dup2 does nothing if it is file 3 already
        os.environ["LISTEN_PID"] = str(os.getpid())
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
