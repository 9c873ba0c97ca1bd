"""Checks that may take long: nobody waits for them, and they are ended."""

import asyncio
import contextlib
import json
import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import InvalidRequest, TooManyRequests
from streams.calls.request.check_process import CheckProcess
from tests.loop_stalls import unstalled
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.samples import chat, completion
from tests.waits import until

CHECKS = "streams.calls.request.checks"
MEGABYTE = 1 << 20
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
QUADRATIC = {"$schema": DRAFT_4, "enum": [{"a": i} for i in range(2_000)]}
SLOW_PATTERN = "(?i)" + "[a\x01-\U0010ffff]" * 1_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat", chat(structured_outputs={"json": QUADRATIC})),
        ("chat", chat(guided_json=json.dumps(QUADRATIC))),
        ("chat", chat(guided_regex=SLOW_PATTERN)),
        ("chat", chat(guided_regex="a" * MEGABYTE)),
        ("chat", chat(guided_json={"required": [[], "", 1] * 6_000})),
        ("chat", chat("x " * MEGABYTE)),
        ("completions", completion("x " * MEGABYTE)),
        ("completions", completion(["x" * 9_000] * 17)),
        ("completions", completion([1] * MEGABYTE)),
        ("chat", {**chat(), "messages": [1] * MEGABYTE}),
        ("chat", {**chat(), "messages": [1] * 30_000}),
        ("chat", chat(bad_words=[1] * 30_000)),
        ("chat", chat(logit_bias={str(i): "" for i in range(30_000)})),
        ("chat", chat(user=[[]] * 900_000)),
    ],
    ids=lambda value: str(value)[-40:],
)
async def test_event_loop_never_stalls_on_any_body(path: str, body: Any) -> None:
    """A stalled event loop loses leases; error lists of every element took seconds."""
    gateway = InProcessGateway()
    gateway.answer_with("ok")
    raw = json.dumps(body).encode()
    target = "/v1/chat/completions" if path == "chat" else "/v1/completions"

    status, answer = await unstalled(call(gateway, raw, target))
    assert status in (200, 400), answer


async def test_check_process_stops_slow_check_and_answers_next() -> None:
    checker = CheckProcess(CHECKS, "checking it")
    try:
        with pytest.raises(InvalidRequest, match="took more than 1 ms"):
            await checker.check("regex", SLOW_PATTERN, 1)
        assert await checker.check("regex", "[a-z]", 60_000) == ""
        assert await checker.check("regex", "(", 60_000) == await checker.check("regex", "(", 0)
    finally:
        checker.close()


async def test_check_process_limits_waiting_checks() -> None:
    checker = CheckProcess(CHECKS, "checking it")
    with pytest.raises(TooManyRequests, match="0 calls for checking it wait; try again"):
        await checker.ask("regex", "never seen", limit_ms=1, waiting_max=0)


async def test_check_process_shares_time_between_tenants() -> None:
    """Slow patterns of one tenant do not delay the checks of others."""
    checker = CheckProcess(CHECKS, "checking it")
    try:
        slow = [
            asyncio.create_task(checker.check("regex", f"{SLOW_PATTERN}{number}", 600_000, "bob"))
            for number in range(4)
        ]
        assert await checker.check("regex", "[a-z]", 60_000, "alice") == ""
        assert not all(task.done() for task in slow)
    finally:
        for task in slow:
            task.cancel()
        await asyncio.wait(slow)
        checker.close()


async def test_check_process_keeps_second_process() -> None:
    """Otherwise the second of two tenants waits for a new process on every call."""
    checker = CheckProcess(CHECKS, "checking it")
    try:
        process_ids = list[set[int]]()
        for number in range(3):
            checks = (
                checker.check("regex", f"{name}{number}", 60_000, name) for name in ("a", "b")
            )
            assert await asyncio.gather(*checks) == ["", ""]
            process_ids.append(
                {process._process.pid for process in checker._idle if process._process is not None}
            )
        assert len(process_ids[0]) == 2 and process_ids[1:] == process_ids[:1] * 2
    finally:
        checker.close()


async def test_check_process_stays_unused_after_giving_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its answer arrives at that moment."""
    checker, is_given_up = CheckProcess(CHECKS, "checking it"), threading.Event()
    try:
        assert await checker.check("regex", "a", 60_000) == ""
        (process,) = checker._idle
        ask_blocking, give_up = process.ask_blocking, process.give_up

        def ask_and_wait(line: bytes, limit_ms: int) -> Any:
            answer = ask_blocking(line, limit_ms)
            is_given_up.wait()
            return answer

        def give_up_and_tell() -> None:
            give_up()
            is_given_up.set()

        monkeypatch.setattr(process, "give_up", give_up_and_tell)
        with monkeypatch.context() as patch:
            patch.setattr(process, "ask_blocking", ask_and_wait)
            check = asyncio.create_task(checker.check("regex", "b", 60_000))
            await until(lambda: bool(checker._busy_processes))
            check.cancel()
            await until(lambda: not checker._busy_processes)
        assert checker._idle == [process] and not process.is_running
        assert await checker.check("regex", "c", 60_000) == ""
    finally:
        checker.close()


async def test_check_process_works_with_over_1024_open_files() -> None:
    """`select` supports only 1 024 file descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4_096), hard))
    with contextlib.ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1_024):
            opened.enter_context(open(os.devnull))
        checker = CheckProcess(CHECKS, "checking it")
        opened.callback(checker.close)
        assert await checker.check("regex", "a", 60_000) == ""


async def test_check_process_stops_after_invalid_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = CheckProcess(CHECKS, "checking it")
    try:
        assert await checker.check("regex", "a", 60_000) == ""
        (process,) = checker._idle
        with monkeypatch.context() as patch:
            patch.setattr("streams.calls.request.check_process.json.loads", int)
            with pytest.raises(ValueError, match="invalid literal"):
                await checker.check("regex", "(", 60_000)
        assert not process.is_running and await checker.check("regex", "b", 60_000) == ""
    finally:
        checker.close()


async def test_check_process_environment_has_no_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TRIVIUM_GATEWAY_API_KEYS", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "sk-secret")
    checker = CheckProcess(CHECKS, "checking it")
    try:
        assert await checker.check("regex", "a", 60_000) == ""
        (process,) = checker._idle
        assert process._process is not None
        environ = Path(f"/proc/{process._process.pid}/environ").read_bytes()
        assert b"PATH=" in environ and b"sk-secret" not in environ
    finally:
        checker.close()
