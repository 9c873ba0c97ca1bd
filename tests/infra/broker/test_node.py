"""The broker's life: start, stop, restart with its data, reset, and what it refuses."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.broker import node, storage
from infra.broker.node import Broker
from infra.broker.probe import broker_answers, free_ports, port_is_taken, reserve_port
from infra.broker.section import BrokerSettings
from infra.processes.identity import Identity, identify
from schemas.errors import BrokerUnavailable, ConfigError
from schemas.log.admin import create_topics, describe_topics
from schemas.settings import LogSettings
from tests.waiting import PATIENCE_S

QUICK = BrokerSettings(port=0, heap_mb=256, quick=True, start_timeout_s=200)
SILENCE_S = 0.1  # of who never answers


@pytest.fixture
def broker(tmp_path: Path, bootstrap: str) -> Iterator[Broker]:
    """A broker of the test's own, not started; skips like everything that needs Java."""
    made = Broker(QUICK, tmp_path / "broker", tethered=True)
    yield made
    made.reset()


async def test_data_survives_a_restart_and_not_a_reset(broker: Broker) -> None:
    address = broker.start()
    assert broker.start() == address, "starting what runs changes nothing"
    log = LogSettings(bootstrap=address, topic_prefix="kept.")
    await create_topics(log)
    assert broker.stop()
    assert not broker.stop()
    assert not broker_answers(address)

    assert broker.start() == address, "a free port is kept over restarts"
    assert all(row.fits for row in await describe_topics(log))
    assert broker.status().data_bytes > 0

    broker.reset()
    assert not broker.folder.exists()
    assert not broker.status().running


def test_a_broker_uses_an_aot_cache_that_is_whole(
    broker: Broker, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broker.start()
    assert f"-XX:AOTCache={cache}" in command(broker)
    maps = Path(f"/proc/{broker.pid}/maps").read_text()
    assert str(cache) in maps, "the JVM has taken it"
    broker.stop()

    damage(cache)
    broker.start()
    if cache.exists():  # this JVM has seen it, and goes on without
        assert str(cache) not in Path(f"/proc/{broker.pid}/maps").read_text()
    else:
        assert "AOTCache" not in command(broker)
        assert "which may be damaged" in caplog.text
    broker.stop()

    cache.unlink(missing_ok=True)
    broker.start()
    assert "AOTCache" not in command(broker)


def test_storage_is_formatted_beside_an_aot_cache_that_is_damaged(
    broker: Broker, cache: Path
) -> None:
    damage(cache)
    broker.folder.mkdir()
    assert any(broker.format().iterdir())


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of the one that set-up has made, for brokers to use."""
    made = node.aot_cache(node.DEFAULT_LIBS)
    if not made.exists():
        pytest.skip("no AOT cache of Kafka; run `make setup`")
    copy = tmp_path / made.name
    shutil.copyfile(made, copy)
    monkeypatch.setattr(node, "aot_cache", lambda libs: copy)
    return copy


def damage(cache: Path) -> None:
    """As a copy that was interrupted; the JVM only looks at its beginning."""
    cache.chmod(0o600)
    os.truncate(cache, cache.stat().st_size // 2)


def command(broker: Broker) -> str:
    return Path(f"/proc/{broker.pid}/cmdline").read_text()


def test_a_broker_that_died_is_told_with_its_last_words(broker: Broker) -> None:
    broker.spawn()
    pid = broker.status().pid
    assert identify(pid)
    os.kill(pid, 9)
    found = identify(pid)
    assert found is None or found.wait(PATIENCE_S)
    with pytest.raises(BrokerUnavailable, match="the broker ended"):
        broker.answers()


@pytest.mark.parametrize("speaks_kafka", [True, False])
def test_a_taken_port_is_told_with_what_to_do(
    tmp_path: Path, bootstrap: str, speaks_kafka: bool
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        taken = bootstrap.rpartition(":")[2] if speaks_kafka else other.getsockname()[1]
        mine = Broker(BrokerSettings(port=int(taken)), tmp_path / "broker")
        expected = "another Kafka broker" if speaks_kafka else "another program"
        with pytest.raises(BrokerUnavailable, match=f"{expected}.*--bootstrap"):
            mine.start()
    assert broker_answers(bootstrap, timeout_s=PATIENCE_S), "what runs there goes on"


def test_of_two_that_start_at_the_same_moment_one_is_refused_at_once(broker: Broker) -> None:
    """Both found the port free, and the processes of both joined whichever broker got it."""
    bootstrap = broker.spawn()
    port = int(bootstrap.rpartition(":")[2])
    late = Broker(replace(QUICK, port=port), broker.folder.with_name("late"))
    with pytest.raises(BrokerUnavailable, match="taken by a broker that another stack starts"):
        late.spawn()
    assert not late.is_running()
    assert broker.stop()
    held = reserve_port("127.0.0.1", port)
    assert held is not None, "whoever stops lets go of it"
    held.close()


def test_another_clusters_broker_is_not_taken_for_ones_own(
    tmp_path: Path, bootstrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else got the port between the look and the start."""
    monkeypatch.setattr(node, "port_is_taken", lambda *_: False)
    port = int(bootstrap.rpartition(":")[2])
    mine = Broker(replace(QUICK, port=port), tmp_path / "broker", tethered=True)
    try:
        with pytest.raises(BrokerUnavailable, match=f"broker.port {port}.*another Kafka broker"):
            mine.start()
        assert not mine.is_running()
    finally:
        mine.reset()


def test_jars_and_java_that_are_missing_are_named(tmp_path: Path) -> None:
    no_jars = Broker(BrokerSettings(port=0, java="true", libs=str(tmp_path)), tmp_path / "a")
    with pytest.raises(ConfigError, match="make setup"):
        no_jars.start()
    no_java = Broker(BrokerSettings(port=0, java="no-such-java"), tmp_path / "b")
    with pytest.raises(ConfigError, match="expected Java 17 or newer, found no 'no-such-java'"):
        no_java.start()


def test_a_comma_in_the_folders_path_is_refused(tmp_path: Path) -> None:
    """Kafka would cut `log.dirs` in two, and scatter its data over both."""
    folder = tmp_path / "this, that" / "broker"
    with pytest.raises(ConfigError, match="this, that.*without a comma.*TRIVIUM_HOME"):
        Broker(BrokerSettings(port=0, java="false"), folder).start()
    assert not list(tmp_path.iterdir())


def test_a_folder_of_any_other_name_is_kafkas(tmp_path: Path) -> None:
    """Java reads property files in Latin-1, and takes a backslash for an escape."""
    folder = tmp_path / "a b\\c \u00e9 \U0001f600" / "broker"
    broker = Broker(BrokerSettings(port=0), folder)
    folder.mkdir(parents=True)
    broker._write_properties(1, 2)
    lines = (folder / "server.properties").read_text().splitlines()
    (found,) = [line.partition("=")[2] for line in lines if line.startswith("log.dirs=")]
    read = found.encode("latin-1").decode("unicode_escape")
    assert read.encode("utf-16", "surrogatepass").decode("utf-16") == str(folder / "data")


def test_storage_that_cannot_be_formatted_is_told(
    tmp_path: Path, bootstrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "template_path", lambda libs: tmp_path / "none")
    if shutil.which("false") is None:
        pytest.skip("no `false` command to stand in for a broken Java")
    with pytest.raises(BrokerUnavailable, match="could not be formatted"):
        Broker(BrokerSettings(port=0, java="false"), tmp_path / "broker").start()


def test_a_process_with_the_same_id_is_not_taken_for_the_broker(tmp_path: Path) -> None:
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        identity = identify(child.pid)
        assert identity is not None
        stranger = Identity(child.pid, identity.started_ticks - 1)
        stranger.stop(grace_s=1)
        assert identity.is_alive(), "another start time is another process"
    finally:
        child.communicate()
    assert not identity.is_alive()


def test_probe_tells_a_broker_from_silence_and_noise(bootstrap: str) -> None:
    assert broker_answers(bootstrap, timeout_s=PATIENCE_S)
    with socket.socket() as deaf:  # it has a port, and does not listen
        deaf.bind(("127.0.0.1", 0))
        assert not broker_answers(f"127.0.0.1:{deaf.getsockname()[1]}")
    assert not broker_answers("nonsense")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert port_is_taken("127.0.0.1", port)
        assert not broker_answers(f"127.0.0.1:{port}", timeout_s=SILENCE_S)


def test_free_ports_are_not_the_same() -> None:
    """A port that was let go may be given out again at once."""
    assert len(set(free_ports(*["127.0.0.1"] * 200))) == 200


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": 70_000}, "broker.port: expected at most 65535, found 70000"),
        ({"heap_mb": 1}, "at least 128"),
    ],
)
def test_settings_are_checked(values: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BrokerSettings(**values)  # type: ignore[arg-type]  # a table of one field each
