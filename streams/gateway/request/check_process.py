"""Asks a process for what may take long, and ends it when an answer takes too long.

One question at a time; a bounded number waits. So neither a schema nor a pattern nor a very long
text or chat stops the event loop, which keeps the gateway's lease.
"""

import asyncio
import atexit
import json
import select
import subprocess
import sys
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any

from schemas.errors import InvalidRequest, TooManyRequests

WAITING_MAX = 32
KNOWN_MAX = 1_024  # answers that are remembered: clients send the same schema again and again
START_MS = 60_000  # its imports, on a machine that is busy
_READ_BYTES = 1 << 20


class CheckProcess:
    """The process and whoever waits for it; started by the first question, and again after loss."""

    def __init__(self, module: str, doing: str) -> None:
        """`module` answers, and `doing` is what callers are told took too long."""
        self._module, self._doing = module, doing
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, module)  # nobody else talks to the process
        self._waiting = 0
        self._known: OrderedDict[bytes, str] = OrderedDict()
        atexit.register(self.close)

    async def check(self, name: str, text: str, limit_ms: int) -> str:
        """What is wrong with a text, by a check of that name; empty when nothing is."""
        digest = blake2b(f"{name}\0{text}".encode(), digest_size=16).digest()
        known = self._known.get(digest)
        if known is not None:
            self._known.move_to_end(digest)
            return known
        answer = str(await self.ask(name, text, limit_ms=limit_ms))
        self._known[digest] = answer
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)
        return answer

    async def ask(
        self, name: str, *arguments: Any, limit_ms: int, waiting_max: int = WAITING_MAX
    ) -> Any:
        """The answer; raises InvalidRequest where it takes longer, TooManyRequests where too many
        wait.
        """
        if self._waiting >= waiting_max:
            raise TooManyRequests(f"{waiting_max} calls for {self._doing} wait; try again")
        line = json.dumps([name, arguments]).encode() + b"\n"
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._ask_blocking, line, limit_ms)
        finally:
            self._waiting -= 1

    def _ask_blocking(self, line: bytes, limit_ms: int) -> Any:
        process = self._process
        if process is None or process.poll() is not None:
            process = self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            return self._read_answer(process, limit_ms)
        except (OSError, EOFError, TimeoutError) as error:
            self.close()
            is_late = isinstance(error, TimeoutError)
            cost = f"more than {limit_ms} ms" if is_late else "too much memory"
            raise InvalidRequest(
                f"{self._doing} took {cost}; make it smaller or simpler"
            ) from error

    def _start(self) -> "subprocess.Popen[bytes]":
        self.close()
        command = [sys.executable, "-m", self._module]
        self._process = process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._read_answer(process, START_MS)
        return process

    def _read_answer(self, process: "subprocess.Popen[bytes]", limit_ms: int) -> Any:
        """The next line; raises TimeoutError, or EOFError when the process ends."""
        assert process.stdout is not None
        parts: list[bytes] = []
        until_s = time.monotonic() + limit_ms / 1000
        while not (parts and parts[-1].endswith(b"\n")):
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
                raise TimeoutError
            parts.append(process.stdout.read1(_READ_BYTES))  # type: ignore[attr-defined]  # a BufferedReader
            if not parts[-1]:
                raise EOFError
        return json.loads(b"".join(parts))

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


# One for a process, however many gateways a test has in it.
CHECK_PROCESS = CheckProcess("streams.gateway.request.checks", "checking it")
# Of what bridges were answered, which would keep calls waiting.
ANSWER_PROCESS = CheckProcess("streams.gateway.request.checks", "checking the answer's form")
