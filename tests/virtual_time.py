"""Tests on virtual time: what waits for a timer costs nothing, and no stall makes it late.

`time.monotonic` and wall time are the loop's there, too. Threads answer in real time, and the clock
stands still for them; it does so for nothing else outside, so no sockets and no NIXL.
"""

import asyncio
import functools
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

from streams.log import clock

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_START_S = 1_000_000.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        self.now_s, self.threads = _START_S, 0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now_s

    def run_in_executor(  # type: ignore[override]  # of a kind that `asyncio.to_thread` calls
        self, executor: Any, call: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        def finish_call(_: object) -> None:
            self.threads -= 1

        self.threads += 1
        future = super().run_in_executor(executor, call, *args)
        future.add_done_callback(finish_call)
        return future


class _LoopClock:
    """A wall clock that shows the loop's time."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def ms(self) -> int:
        return int(self._loop.now_s * 1e9) // 1_000_000


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if self._loop.threads or timeout is None:
            return super().select(timeout and 1)
        ready = super().select(0)
        if not ready:
            self._loop.now_s += timeout
        return ready


def run_virtual(main: Coroutine[Any, Any, Result], *, seconds: float = 30) -> Result:
    """Run a test's coroutine on virtual time; TimeoutError when it takes longer by that."""

    async def limited() -> Result:
        async with asyncio.timeout(seconds):
            return await main

    loop = VirtualLoop()
    unseen: list[dict[str, Any]] = []  # errors that nobody asked for
    loop.set_exception_handler(lambda _, context: unseen.append(context))
    with (
        patch.multiple(time, monotonic=loop.time, time_ns=lambda: int(loop.now_s * 1e9)),
        patch.object(clock, "_CLOCK", _LoopClock(loop)),
        asyncio.Runner(loop_factory=lambda: loop) as runner,
    ):
        result = runner.run(limited())
    assert not unseen, unseen
    return result


def virtual(
    test: Callable[Arguments, Coroutine[Any, Any, None]],
) -> Callable[Arguments, None]:
    """A decorator: the test runs on virtual time."""

    @functools.wraps(test)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        run_virtual(test(*args, **kwargs))

    return run
