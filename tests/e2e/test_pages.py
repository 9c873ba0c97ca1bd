"""What the pages say, done: every block that is marked `<!-- runs -->`, on one stack.

Commands run as they stand, but for the gateway's address and the request's id.
"""

import asyncio
import shlex
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from infra.cli.app import app
from infra.stack.launcher import Stack
from schemas.settings import LogSettings
from tests.e2e.harness import Client, sim_settings, stack
from tests.long_leases import LONG_LEASES
from tests.page_blocks import TRIVIUM, Block, blocks
from tests.waits import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(1_800)]

PAGE_URL, PAGE_BROKER = "http://127.0.0.1:8000", "127.0.0.1:9092"
MODEL = "smollm2-135m-instruct"  # as the pages call it
PAGE_EMBEDDER, EMBEDDER = "all-minilm-l6-v2", "hash"  # as the pages call it, and what runs here


@pytest.fixture
async def running(
    kafka_with: Callable[..., Awaitable[LogSettings]], tmp_path: Path
) -> AsyncIterator[Stack]:
    """What the page on operating starts. Router, gateway and commands ask the retrieval pool."""
    settings = sim_settings(await kafka_with(asker_partitions=8))
    settings = replace(settings, model=replace(settings.model, name=MODEL))
    folder = tmp_path / "home"
    async with stack(
        settings, folder, prefill=2, decode=2, retrieval=2, shards=2, embedding=1, bridges=1
    ) as running_stack:
        yield running_stack


def write_files(folder: Path) -> None:
    """The files that the page on retrieval names."""
    (folder / "books.jsonl").write_text(
        '{"id": "a", "vector": [0.1, 0.9], "metadata": {"year": 2020}}\n'
        '{"id": "b", "vector": [0.9, 0.1], "metadata": {"year": 2019}}\n'
    )
    (folder / "docs").mkdir()
    (folder / "docs" / "ferry.md").write_text("# Ferries\n\nThe Ondry ferry leaves from pier 7.\n")
    np.save(folder / "q.npy", np.array([0.1, 0.9], np.float32))
    draw = np.random.default_rng(1)
    np.save(folder / "vectors.npy", draw.standard_normal((200, 8), np.float32))


def environ(running: Stack) -> dict[str, str]:
    """Variables with which `trivium` finds the stack, and counts as there whoever is slow."""
    log = running.settings.log
    values = asdict(log)
    log_values = {name: value for name, value in values.items() if name.endswith("_partitions")}
    log_values |= {"bootstrap": log.bootstrap, "topic_prefix": log.topic_prefix}
    log_env = {f"TRIVIUM_LOG_{name.upper()}": str(value) for name, value in log_values.items()}
    return log_env | LONG_LEASES | {"TRIVIUM_HOME": str(running.folder)}


def trivium(words: list[str]) -> str:
    """Run a command; empty where it went well, else its output."""
    result = CliRunner().invoke(app, words)
    return (
        ""
        if result.exit_code == 0
        else f"{shlex.join(words)}: {result.output}\n{result.exception!r}"
    )


def run_program(words: list[str]) -> str:
    """Run another program; empty where it went well, else its output."""
    result = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    return "" if result.returncode == 0 else f"{shlex.join(words)}: {result.stdout}{result.stderr}"


async def search_succeeds(words: list[str]) -> bool:
    return not await asyncio.to_thread(trivium, words)


def of_stack(text: str, running: Stack) -> str:
    """With the stack's addresses and names of topics instead of the page's."""
    log = running.settings.log
    text = text.replace(PAGE_URL, running.gateway_urls[0]).replace(PAGE_BROKER, log.bootstrap)
    text = text.replace(PAGE_EMBEDDER, EMBEDDER)
    for topic in ("prompts", "answers"):
        text = text.replace(f'"{topic}"', f'"{log.topic_prefix}{topic}"')
    return text


async def run(block: Block, running: Stack, request_id: str) -> None:
    text = of_stack(block.text, running)
    if block.language == "python":
        assert not await asyncio.to_thread(run_program, [sys.executable, "-c", text])
        return
    for words in replace(block, text=text).commands():
        words = [request_id if word == "ID" else word for word in words]
        if words[0] != TRIVIUM:
            if shutil.which(words[0]):
                assert not await asyncio.to_thread(run_program, words)
        elif words[1] == "search":  # documents are applied a moment after they are loaded
            await until(partial(search_succeeds, words[1:]), seconds=PATIENCE_S)
        else:
            assert not await asyncio.to_thread(trivium, words[1:])


async def test_commands_of_pages_succeed(
    running: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the main pages has a block of commands."""
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, value in environ(running).items():
        monkeypatch.setenv(name, value)
    url = running.gateway_urls[0]
    async with Client(url, MODEL) as client:
        request_id = (await client.chat("Why a log?")).headers["x-trivium-request-id"]
    marked = [block for block in blocks("sh", "python") if block.runs]
    pages = {block.page for block in marked}
    assert {
        f"infra/docs/{name}.md"
        for name in ("operate", "retrieve", "integrate", "placement", "traces")
    } <= pages
    for block in marked:
        await run(block, running, request_id)
