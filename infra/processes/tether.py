"""Runs a command that ends with its parent: `python tether.py PARENT_PID COMMAND...`.

The kernel sends SIGTERM to the command when the thread that started it dies, so nothing outlives
a launcher that was killed. A script of its own, not a hook between fork and exec, because such
hooks are unsafe in programs with threads. Imports nothing of ours, so that it starts in
milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def tethered(*command: str) -> list[str]:
    """The command, for a process that is to end with the thread that starts it."""
    return [sys.executable, "-IS", __file__, str(os.getpid()), *command]


def main() -> None:
    """Ask for the signal, check that the parent still lives, become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the launcher ended before its process began")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
