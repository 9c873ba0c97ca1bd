"""What all tests share: a real broker for the session, fresh topics for a test, and their order.

Nothing stays behind: the broker ends with the session, and with the test process if that is killed.
"""

import asyncio
import gc
import itertools
import os
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from hypothesis import settings as hypothesis_settings
from xdist.remote import Producer

# vLLM starts three processes that import all of it anew; without a bytecode cache that doubles
# the time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the tests' models are made here, never fetched
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from infra.broker.node import Broker
from infra.broker.section import BrokerSettings
from infra.processes.identity import children, identify
from schemas.errors import ConfigError
from schemas.settings import LogSettings
from streams.calls.request.check_process import ANSWER_PROCESS, CHECK_PROCESS
from streams.openai.indexing.reading import FILE_PROCESS, INDEX_PROCESS
from tests.xdist_scheduler import WholeFiles

pytest_plugins = ("tests.runs.after_failures", "tests.runs.near_limits", "tests.runs.parsing")

# The same examples each time, however slow; `--hypothesis-profile default` looks for new ones.
hypothesis_settings.load_profile("ci")
_session = f"test-{os.getpid()}-{time.time_ns() // 1_000_000:x}"  # ids of processes come again
_prefixes = (f"{_session}-{number}." for number in itertools.count(1))
_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 2 << 30
_RANKS = {"kafka": 1, "docker": 2, "vllm": 3, "gpu": 4}  # what needs least runs first
_LEFT_OUT = {  # unless they are asked for: by `-m`, by the name of their file, or by `--all`
    "slow": "takes long: `make test-all`",
    "brokers": "takes minutes: `make test-brokers`",
    "platform": "large downloads: `make test-platform`",
    "clients": "large downloads: `make test-clients`",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="run slow, brokers, platform and clients, too"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what uses the broker and what is left out, then order: tidy, pure, broker, Docker, vLLM,
    GPU.

    In several processes it is the other way round: what takes longest must not begin last.
    """
    option = config.option
    names = [arg.partition("::")[0] for arg in config.args]
    is_named = not option.markexpr and all(name.endswith(".py") for name in names)
    left_out = {} if option.all or is_named else _LEFT_OUT
    for item in items:
        if "bootstrap" in getattr(item, "fixturenames", ()):
            item.add_marker("kafka")
        for mark, reason in left_out.items():
            if item.get_closest_marker(mark) and mark not in option.markexpr:
                item.add_marker(pytest.mark.skip(reason=reason))
    items.sort(key=_turn if hasattr(config, "workerinput") else _rank)


def pytest_collection_finish() -> None:
    """Freeze the objects of all modules, so that garbage collections skip them: 10 % of time."""
    gc.collect()
    gc.freeze()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> WholeFiles:
    """How `make test` deals tests to its processes."""
    return WholeFiles(config, log)


@pytest.fixture
def recursion_limit() -> Iterator[None]:
    """Python's own recursion limit, whatever another test of this process has let raise it."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1_000)
    yield
    sys.setrecursionlimit(before)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Fail when a test left a process behind, and end it. Made first, so checked last."""
    yield
    for process in (
        CHECK_PROCESS,
        ANSWER_PROCESS,
        FILE_PROCESS,
        INDEX_PROCESS,
    ):  # as a gateway's are
        process.close()
    leftovers = {
        pid: command
        for pid, command in children(os.getpid()).items()
        if "resource_tracker" not in command  # the standard library's; ends with this process
    }
    for pid in leftovers:
        if (identity := identify(pid)) is not None:
            identity.stop(grace_s=5)
    assert not leftovers, f"left running by a test: {leftovers}"


def _rank(item: pytest.Item) -> tuple[int, bool]:
    rank = max((_RANKS.get(mark.name, 0) for mark in item.iter_markers()), default=0)
    return rank, item.path.name != "test_tidy.py"


def _turn(item: pytest.Item) -> tuple[int, bool, bool, bool]:
    """Whole stacks begin early. Only those of vLLM follow its engines: the first of these leaves
    bytecode for all."""
    rank, is_no_tidy = _rank(item)
    is_late = ("e2e" in item.path.parts) == (rank >= _RANKS["vllm"])
    return (
        -rank,
        is_late,
        not {"vector", "retrieval", "search"} & {*item.path.parts},
        not is_no_tidy,
    )


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Async tests run on plain asyncio."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def trivium_home(
    tmp_path_factory: pytest.TempPathFactory, nothing_left_running: None
) -> Iterator[Path]:
    """A state folder of the session's own; nothing touches the working tree's."""
    folder = tmp_path_factory.mktemp("home")
    before = os.environ.get("TRIVIUM_HOME")
    os.environ["TRIVIUM_HOME"] = str(folder)
    yield folder
    if before is None:
        del os.environ["TRIVIUM_HOME"]
    else:
        os.environ["TRIVIUM_HOME"] = before


@pytest.fixture(scope="session")
def broker_folder(trivium_home: Path) -> Iterator[Path]:
    """In memory, where there is room: to make the topics of one test takes a second longer on a
    disk, behind the deletion of another's."""
    for stale_folder in _MEMORY.glob("trivium-tests-*"):  # of a session that was killed
        if identify(int(stale_folder.name.rpartition("-")[2])) is None:
            shutil.rmtree(stale_folder, ignore_errors=True)
    folder = trivium_home / "broker"
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ROOM_BYTES:
        folder = _MEMORY / f"trivium-tests-{os.getpid()}"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def bootstrap(trivium_home: Path, broker_folder: Path) -> Iterator[str]:
    """The address of a real broker; TEST_KAFKA_BOOTSTRAP names one that runs already."""
    if external_address := os.environ.get("TEST_KAFKA_BOOTSTRAP"):
        yield external_address
        return
    settings = BrokerSettings(port=0, heap_mb=512, quick=True, start_timeout_s=110.0)
    broker = Broker(settings, broker_folder, tethered=True)
    try:
        address = broker.start()
    except ConfigError as error:  # no Java or no jars: the message says which
        pytest.skip(str(error))
    try:
        yield address
    finally:
        broker.stop()


async def _fresh_topics(bootstrap: str, **changes: object) -> LogSettings:
    from streams.log.admin import create_topics

    few = {"session_partitions": 2, "worker_partitions": 4, "gateway_partitions": 2}
    few |= {"retrieval_partitions": 2, "asker_partitions": 2, "document_partitions": 2}
    few |= {"prompt_partitions": 2}
    fields = {"bootstrap": bootstrap, "topic_prefix": next(_prefixes), **few}
    fields |= {"request_timeout_ms": 30_000, **changes}  # longer than any machine stalls
    settings = LogSettings(**fields)  # type: ignore[arg-type]  # fields of mixed types
    await create_topics(settings)
    return settings


async def _delete_topics(logs: list[LogSettings]) -> None:
    """A broker of few hundred MiB holds some thousand partitions, then fences itself for ever."""
    from streams.log.admin import expected_topics
    from streams.log.connecting import client_options

    for settings in logs:
        client = AIOKafkaAdminClient(**client_options(settings))
        try:
            await client.start()
            await client.delete_topics(list(expected_topics(settings)), timeout_ms=30_000)
        finally:
            await client.close()


@pytest.fixture
def kafka_with(bootstrap: str) -> Iterator[Callable[..., Awaitable[LogSettings]]]:
    """A function to await: fresh topics, with any field of LogSettings changed."""
    logs: list[LogSettings] = []

    async def make(**changes: object) -> LogSettings:
        logs.append(await _fresh_topics(bootstrap, **changes))
        return logs[-1]

    yield make
    asyncio.run(_delete_topics(logs))


@pytest.fixture
def kafka(bootstrap: str) -> Iterator[LogSettings]:
    """A real broker with fresh topics: 2 session, 4 worker and 2 gateway partitions."""
    settings = asyncio.run(_fresh_topics(bootstrap))
    yield settings
    asyncio.run(_delete_topics([settings]))
