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
from schemas.settings import LogSettings
from streams.log.admin import create_topics, describe_topics
from tests.waits import PATIENCE_S

QUICK = BrokerSettings(port=0, heap_mb=256, quick=True, start_timeout_s=200)
SILENCE_S = 0.1  # of who never answers


@pytest.fixture
def broker(tmp_path: Path, bootstrap: str) -> Iterator[Broker]:
    """A broker of the test's own, not started; skips like everything that needs Java."""
    fresh_broker = Broker(QUICK, tmp_path / "broker", tethered=True)
    yield fresh_broker
    fresh_broker.reset()


async def test_broker_keeps_data_over_restart_and_drops_it_on_reset(broker: Broker) -> None:
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


def test_broker_uses_only_complete_aot_cache(
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


def test_broker_formats_storage_despite_damaged_aot_cache(broker: Broker, cache: Path) -> None:
    damage(cache)
    broker.folder.mkdir()
    assert any(broker.format().iterdir())


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of the AOT cache that set-up made, for brokers to use."""
    source_cache = node.aot_cache(node.DEFAULT_LIBS)
    if not source_cache.exists():
        pytest.skip("no AOT cache of Kafka; run `make setup`")
    copy = tmp_path / source_cache.name
    shutil.copyfile(source_cache, copy)
    monkeypatch.setattr(node, "aot_cache", lambda libs: copy)
    return copy


def damage(cache: Path) -> None:
    """As a copy that was interrupted; the JVM only looks at its beginning."""
    cache.chmod(0o600)
    os.truncate(cache, cache.stat().st_size // 2)


def command(broker: Broker) -> str:
    return Path(f"/proc/{broker.pid}/cmdline").read_text()


def test_broker_error_reports_early_death(broker: Broker) -> None:
    broker.spawn()
    pid = broker.status().pid
    assert identify(pid)
    os.kill(pid, 9)
    identity = identify(pid)
    assert identity is None or identity.wait(PATIENCE_S)
    with pytest.raises(BrokerUnavailable, match="the broker ended"):
        broker.answers()


@pytest.mark.parametrize("speaks_kafka", [True, False])
def test_broker_error_names_port_holder_and_remedy(
    tmp_path: Path, bootstrap: str, speaks_kafka: bool
) -> None:
    with socket.socket() as other_socket:
        other_socket.bind(("127.0.0.1", 0))
        port = bootstrap.rpartition(":")[2] if speaks_kafka else other_socket.getsockname()[1]
        new_broker = Broker(BrokerSettings(port=int(port)), tmp_path / "broker")
        expected = "another Kafka broker" if speaks_kafka else "another program"
        with pytest.raises(BrokerUnavailable, match=f"{expected}.*--bootstrap"):
            new_broker.start()
    assert broker_answers(bootstrap, timeout_s=PATIENCE_S), "what runs there goes on"


def test_broker_refuses_port_reserved_by_concurrent_start(broker: Broker) -> None:
    """Both once found the port free, and both stacks joined whichever broker got it."""
    bootstrap = broker.spawn()
    port = int(bootstrap.rpartition(":")[2])
    late = Broker(replace(QUICK, port=port), broker.folder.with_name("late"))
    with pytest.raises(BrokerUnavailable, match="taken by a broker that another stack starts"):
        late.spawn()
    assert not late.is_running()
    assert broker.stop()
    reservation = reserve_port("127.0.0.1", port)
    assert reservation is not None, "whoever stops lets go of it"
    reservation.close()


def test_broker_start_rejects_broker_of_another_cluster(
    tmp_path: Path, bootstrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another broker got the port between the check and the start."""
    monkeypatch.setattr(node, "port_is_taken", lambda *_: False)
    port = int(bootstrap.rpartition(":")[2])
    new_broker = Broker(replace(QUICK, port=port), tmp_path / "broker", tethered=True)
    try:
        with pytest.raises(BrokerUnavailable, match=f"broker.port {port}.*another Kafka broker"):
            new_broker.start()
        assert not new_broker.is_running()
    finally:
        new_broker.reset()


def test_broker_error_names_missing_jars_or_java(tmp_path: Path) -> None:
    no_jars = Broker(BrokerSettings(port=0, java="true", libs=str(tmp_path)), tmp_path / "a")
    with pytest.raises(ConfigError, match="make setup"):
        no_jars.start()
    no_java = Broker(BrokerSettings(port=0, java="no-such-java"), tmp_path / "b")
    with pytest.raises(ConfigError, match="expected Java 17 or newer, found no 'no-such-java'"):
        no_java.start()


def test_broker_rejects_comma_in_folder_path(tmp_path: Path) -> None:
    """Kafka would split `log.dirs` at the comma and scatter its data over both halves."""
    folder = tmp_path / "this, that" / "broker"
    with pytest.raises(ConfigError, match="this, that.*without a comma.*TRIVIUM_HOME"):
        Broker(BrokerSettings(port=0, java="false"), folder).start()
    assert not list(tmp_path.iterdir())


def test_broker_properties_escape_folder_path(tmp_path: Path) -> None:
    """Java reads property files in Latin-1 and takes a backslash for an escape."""
    folder = tmp_path / "a b\\c \u00e9 \U0001f600" / "broker"
    broker = Broker(BrokerSettings(port=0), folder)
    folder.mkdir(parents=True)
    broker._write_properties(1, 2)
    lines = (folder / "server.properties").read_text().splitlines()
    (encoded_folder,) = [line.partition("=")[2] for line in lines if line.startswith("log.dirs=")]
    read = encoded_folder.encode("latin-1").decode("unicode_escape")
    assert read.encode("utf-16", "surrogatepass").decode("utf-16") == str(folder / "data")


def test_broker_error_reports_failed_storage_format(
    tmp_path: Path, bootstrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "template_path", lambda libs: tmp_path / "none")
    if shutil.which("false") is None:
        pytest.skip("no `false` command to stand in for a broken Java")
    with pytest.raises(BrokerUnavailable, match="could not be formatted"):
        Broker(BrokerSettings(port=0, java="false"), tmp_path / "broker").start()


def test_identity_ignores_process_with_reused_pid(tmp_path: Path) -> None:
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


def test_probe_distinguishes_broker_from_silence_and_noise(bootstrap: str) -> None:
    assert broker_answers(bootstrap, timeout_s=PATIENCE_S)
    with socket.socket() as deaf:  # it has a port, and does not listen
        deaf.bind(("127.0.0.1", 0))
        assert not broker_answers(f"127.0.0.1:{deaf.getsockname()[1]}")
    assert not broker_answers("nonsense")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert port_is_taken("127.0.0.1", port)
        assert not broker_answers(f"127.0.0.1:{port}", timeout_s=SILENCE_S)


def test_free_ports_returns_distinct_ports() -> None:
    """A port that was released may be given out again at once."""
    assert len(set(free_ports(*["127.0.0.1"] * 200))) == 200


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": 70_000}, "broker.port: expected at most 65535, found 70000"),
        ({"heap_mb": 1}, "at least 128"),
    ],
)
def test_broker_settings_reject_values_out_of_range(values: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BrokerSettings(**values)  # type: ignore[arg-type]  # a table of one field each
