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
from streams.gateway.request.check_process import CheckProcess
from tests.stalls import unstalled
from tests.streams.gateway.in_process import InProcessGateway, call
from tests.streams.gateway.samples import chat, completion
from tests.waiting import until

CHECKS = "streams.gateway.request.checks"
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
async def test_no_body_stalls_the_event_loop(path: str, body: Any) -> None:
    """20 KB stalled the loop until leases were lost, and two megabytes for ten seconds more, by the
    errors of every item."""
    gateway = InProcessGateway(aside_ms=2_000)
    gateway.answer_with("ok")
    raw = json.dumps(body).encode()
    target = "/v1/chat/completions" if path == "chat" else "/v1/completions"

    status, answer = await unstalled(call(gateway, raw, target))
    assert status in (200, 400), answer


async def test_a_check_that_takes_too_long_is_ended_and_the_next_one_answered() -> None:
    one = CheckProcess(CHECKS, "checking it")
    try:
        with pytest.raises(InvalidRequest, match="took more than 1 ms"):
            await one.check("regex", SLOW_PATTERN, 1)
        assert await one.check("regex", "[a-z]", 60_000) == ""
        assert await one.check("regex", "(", 60_000) == await one.check("regex", "(", 0)
    finally:
        one.close()


async def test_only_so_many_checks_wait() -> None:
    one = CheckProcess(CHECKS, "checking it")
    with pytest.raises(TooManyRequests, match="0 calls for checking it wait; try again"):
        await one.ask("regex", "never seen", limit_ms=1, waiting_max=0)


async def test_one_tenants_checks_keep_nobody_else_waiting() -> None:
    """34 patterns of five seconds kept all others from theirs (found 28)."""
    one = CheckProcess(CHECKS, "checking it")
    try:
        slow = [
            asyncio.create_task(one.check("regex", f"{SLOW_PATTERN}{number}", 600_000, "bob"))
            for number in range(4)
        ]
        assert await one.check("regex", "[a-z]", 60_000, "alice") == ""
        assert not all(task.done() for task in slow)
    finally:
        for task in slow:
            task.cancel()
        await asyncio.wait(slow)
        one.close()


async def test_a_second_process_stays() -> None:
    """Else the second of two tenants waits for a new one whenever both ask (review of 28)."""
    one = CheckProcess(CHECKS, "checking it")
    try:
        seen = list[set[int]]()
        for number in range(3):
            asked = (one.check("regex", f"{name}{number}", 60_000, name) for name in ("a", "b"))
            assert await asyncio.gather(*asked) == ["", ""]
            seen.append({each._process.pid for each in one._idle if each._process is not None})
        assert len(seen[0]) == 2 and seen[1:] == seen[:1] * 2
    finally:
        one.close()


async def test_a_process_that_was_given_up_is_asked_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though its answer came at that moment."""
    one, is_given_up = CheckProcess(CHECKS, "checking it"), threading.Event()
    try:
        assert await one.check("regex", "a", 60_000) == ""
        (process,) = one._idle
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
            asked = asyncio.create_task(one.check("regex", "b", 60_000))
            await until(lambda: bool(one._busy_processes))
            asked.cancel()
            await until(lambda: not one._busy_processes)
        assert one._idle == [process] and not process.is_running
        assert await one.check("regex", "c", 60_000) == ""
    finally:
        one.close()


async def test_as_many_files_may_be_open_as_the_system_lets() -> None:
    """`select` knows 1 024 of them (review of 28)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4_096), hard))
    with contextlib.ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1_024):
            opened.enter_context(open(os.devnull))
        one = CheckProcess(CHECKS, "checking it")
        opened.callback(one.close)
        assert await one.check("regex", "a", 60_000) == ""


async def test_what_a_process_should_not_say_is_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    one = CheckProcess(CHECKS, "checking it")
    try:
        assert await one.check("regex", "a", 60_000) == ""
        (process,) = one._idle
        with monkeypatch.context() as patch:
            patch.setattr("streams.gateway.request.check_process.json.loads", int)
            with pytest.raises(ValueError, match="invalid literal"):
                await one.check("regex", "(", 60_000)
        assert not process.is_running and await one.check("regex", "b", 60_000) == ""
    finally:
        one.close()


async def test_a_process_that_reads_what_strangers_send_has_no_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TRIVIUM_GATEWAY_API_KEYS", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "sk-secret")
    one = CheckProcess(CHECKS, "checking it")
    try:
        assert await one.check("regex", "a", 60_000) == ""
        (process,) = one._idle
        assert process._process is not None
        environ = Path(f"/proc/{process._process.pid}/environ").read_bytes()
        assert b"PATH=" in environ and b"sk-secret" not in environ
    finally:
        one.close()
