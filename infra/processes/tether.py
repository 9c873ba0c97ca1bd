"""Runs a command that ends with its parent: `python tether.py PARENT_PID LISTENER COMMAND...`.

The kernel sends SIGTERM to the command when the thread that started it dies, so nothing outlives a
launcher that was killed. A script of its own, not a hook between fork and exec, because such hooks
are unsafe in programs with threads. A LISTENER that is not -1 is a socket for the command, which
gets it as systemd passes one on: as file 3, with its own id in `LISTEN_PID`. Imports nothing of
ours, so that it starts in milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_LISTEN_FILE = 3


def tethered(*command: str, listener: int = -1) -> list[str]:
    """The command, for a process that is to end with the thread that starts it."""
    return [sys.executable, "-IS", __file__, str(os.getpid()), str(listener), *command]


def main() -> None:
    """Ask for the signal, check that the parent still lives, become the command."""
    parent, listener, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the launcher ended before its process began")
    if listener >= 0:
        os.dup2(listener, _LISTEN_FILE)
        os.set_inheritable(_LISTEN_FILE, True)  # where it is that one, nothing was copied
        os.environ["LISTEN_PID"] = str(os.getpid())
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
