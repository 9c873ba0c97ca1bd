"""Runs slow checks in child processes, and ends a process if its answer takes too long.

Each tenant has one question in progress, and a bounded number of questions waits; tenants take
turns. A question whose caller has gone is not sent; if it is in progress, its process is ended. So
no schema, pattern, or very long text or chat blocks the event loop, which renews the gateway's
lease, and no tenant's slow questions delay others while a process is free.
"""

import asyncio
import atexit
import json
import select
import subprocess
import sys
import time
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

from schemas.errors import InvalidRequest, TooManyRequests
from schemas.sections import environment_of_child

PROCESSES_MAX = 2  # per `CheckProcess`; the second starts when several tenants ask
CHECK_MS: Final = 5_000  # of one check, or of encoding a long text: callers wait no longer
WAITING_MAX = 32  # waiting questions of a tenant
KNOWN_MAX = 1_024  # cached answers: clients send the same schema repeatedly
START_MS = 60_000  # for the imports of the process on a busy machine
_READ_BYTES = 1 << 20


class _Process:
    """One child process; its first question starts it, and so does the next one after a loss."""

    def __init__(self, module: str, doing: str) -> None:
        self._module, self._doing = module, doing
        self._process: subprocess.Popen[bytes] | None = None
        self._is_given_up = False  # the question in progress
        self.thread = ThreadPoolExecutor(1, module)  # the only thread that uses the pipes

    def ask_blocking(self, line: bytes, limit_ms: int) -> Any:
        try:
            process = self._process
            if process is None or process.poll() is not None:
                process = self._start()
            if self._is_given_up:
                raise EOFError
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
            return self._read_answer(process, limit_ms)
        except Exception as error:  # after any error: its next output may belong to this question
            self.close()
            if not isinstance(error, OSError | EOFError):
                raise
            if isinstance(error, TimeoutError):
                raise TooSlow(
                    f"{self._doing} took more than {limit_ms} ms; make it smaller or simpler"
                ) from error
            raise InvalidRequest(
                f"{self._doing} took too much memory; make it smaller or simpler"
            ) from error

    def _start(self) -> "subprocess.Popen[bytes]":
        self.close()
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment_of_child(),
        )
        self._read_answer(process, START_MS)
        return process

    def _read_answer(self, process: "subprocess.Popen[bytes]", limit_ms: int) -> Any:
        """Return the next line of JSON, or after a line `[` the list of the lines up to a line `]`.

        Long answers are such lists of short lines: parsing one long line would block all other
        threads. Raises TimeoutError, or EOFError when the process ends.
        """
        assert process.stdout is not None
        line, items = list[bytes](), None
        until_s = time.monotonic() + limit_ms / 1000
        ready = select.poll()  # `select` accepts file descriptors below 1 024 only
        ready.register(process.stdout, select.POLLIN)
        while True:
            left_ms = (until_s - time.monotonic()) * 1000
            if left_ms <= 0 or not ready.poll(left_ms):
                raise TimeoutError
            *ends, rest = process.stdout.read1(_READ_BYTES).split(b"\n")  # type: ignore[attr-defined]  # a BufferedReader
            if not ends and not rest:
                raise EOFError
            for end in ends:
                text = b"".join([*line, end])
                line.clear()
                if text == b"[":
                    items = list[Any]()
                elif items is None:
                    return json.loads(text)
                elif text == b"]":
                    return items
                else:
                    items.append(json.loads(text))
            line.append(rest)

    @property
    def is_running(self) -> bool:
        """Return whether the process is running and can answer at once."""
        return self._process is not None

    def give_up(self) -> None:
        """Make the question in progress fail; call `renew_blocking` before the next one."""
        self._is_given_up = True
        if (process := self._process) is not None:
            process.kill()

    def renew_blocking(self) -> None:
        """End a process that was given up, even if its answer came at that moment."""
        self.close()
        self._is_given_up = False

    def close(self) -> None:
        """End the process, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


class TooSlow(InvalidRequest):
    """The check of a value took longer than its limit."""


@dataclass(slots=True, eq=False)
class _Question:
    line: bytes
    limit_ms: int
    answer: asyncio.Future[Any] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class CheckProcess:
    """The processes of one module, and the queue of questions for them."""

    def __init__(self, module: str, doing: str) -> None:
        """Set up the processes. `module` answers questions; `doing` names them in messages to
        callers."""
        self._module, self._doing = module, doing
        self._idle = [_Process(module, doing)]
        self._busy_processes: dict[str, _Process] = {}  # by tenant with a question in progress
        self._queues: dict[str, deque[_Question]] = {}  # by tenant, the next one first
        self._tasks: set[asyncio.Task[None]] = set()
        self._cached_answers: OrderedDict[bytes, str] = OrderedDict()
        atexit.register(self.close)

    async def check(self, name: str, text: str, limit_ms: int, tenant: str = "") -> str:
        """Return what the check of that name finds wrong with a text; empty if nothing is. Answers
        are cached."""
        digest = blake2b(f"{name}\0{text}".encode(), digest_size=16).digest()
        cached_answer = self._cached_answers.get(digest)
        if cached_answer is not None:
            self._cached_answers.move_to_end(digest)
            return cached_answer
        answer = str(await self.ask(name, text, limit_ms=limit_ms, tenant=tenant))
        self._cached_answers[digest] = answer
        if len(self._cached_answers) > KNOWN_MAX:
            self._cached_answers.popitem(last=False)
        return answer

    async def ask(
        self,
        name: str,
        *arguments: Any,
        limit_ms: int,
        tenant: str = "",
        waiting_max: int = WAITING_MAX,
    ) -> Any:
        """Return the answer of a function in the process.

        Raises InvalidRequest if it takes too much time or memory, and TooManyRequests if too many
        questions of the tenant wait.
        """
        self.check_queue(tenant, waiting_max)
        question = _Question(json.dumps([name, arguments]).encode() + b"\n", limit_ms)
        self._queues.setdefault(tenant, deque()).append(question)
        self._begin()
        try:
            return await question.answer
        finally:
            if question in (queue := self._queues.get(tenant, deque())):  # the caller has gone
                queue.remove(question)

    def check_queue(self, tenant: str, waiting_max: int) -> None:
        """Raise TooManyRequests if a tenant has `waiting_max` questions already."""
        if len(self._queues.get(tenant, ())) + (tenant in self._busy_processes) >= waiting_max:
            raise TooManyRequests(f"{waiting_max} calls for {self._doing} wait; try again")

    def _begin(self) -> None:
        """Send the questions that can be sent now."""
        for tenant in list(self._queues):
            if tenant in self._busy_processes:
                continue
            queue = self._queues.pop(tenant)
            if not queue:
                continue
            process = self._free()
            if process is None:
                self._queues = {tenant: queue, **self._queues}
                return
            question = queue.popleft()
            if queue:
                self._queues[tenant] = queue  # behind other tenants
            self._busy_processes[tenant] = process
            task = asyncio.create_task(self._answer(tenant, process, question))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _free(self) -> _Process | None:
        if self._idle:
            return self._idle.pop()
        return (
            _Process(self._module, self._doing)
            if len(self._busy_processes) < PROCESSES_MAX
            else None
        )

    async def _answer(self, tenant: str, process: _Process, question: _Question) -> None:
        loop = asyncio.get_running_loop()
        asking = loop.run_in_executor(
            process.thread, process.ask_blocking, question.line, question.limit_ms
        )
        asking.add_done_callback(lambda future: future.cancelled() or future.exception())
        try:
            await asyncio.wait([asking, question.answer], return_when="FIRST_COMPLETED")
            if not asking.done():
                process.give_up()
                await asyncio.wait([asking])
                await loop.run_in_executor(process.thread, process.renew_blocking)
            if question.answer.done():  # the caller has gone
                return
            if (error := asking.exception()) is not None:
                question.answer.set_exception(error)
            else:
                question.answer.set_result(asking.result())
        finally:
            if self._busy_processes.get(tenant) is process:
                del self._busy_processes[tenant]
                self._idle.append(process)
                self._idle.sort(
                    key=lambda candidate: candidate.is_running
                )  # a running one is used next
                self._begin()

    def close(self) -> None:
        """End all processes of this kind."""
        self._idle += self._busy_processes.values()
        self._busy_processes.clear()
        self._queues.clear()
        for process in self._idle:
            process.close()
        del self._idle[1:]


# One per process, however many gateways a test has in it.
CHECK_PROCESS = CheckProcess("streams.calls.request.checks", "checking it")
# For answers to bridges, so that calls of clients do not wait behind them.
ANSWER_PROCESS = CheckProcess("streams.calls.request.checks", "checking the answer's form")
