"""The storage of a new node is a copy, with a cluster of its own, of one that is whole."""

import re
from pathlib import Path

import pytest

from infra.broker import storage
from infra.broker.node import Broker
from infra.broker.section import BrokerSettings


def cluster_of(data: Path) -> str:
    found = re.search(r"^cluster\.id=(.+)$", (data / "meta.properties").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    (made / "log").mkdir(parents=True)
    (made / "log" / "snapshot").write_bytes(b"voters")
    (made / "meta.properties").write_text("node.id=1\ncluster.id=first\ndirectory.id=d\n")
    kept = tmp_path / "kept"
    storage.save_template(made, kept)
    return kept


def test_a_copy_has_a_cluster_of_its_own_and_all_else(kept: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert not storage.is_formatted(data)
    assert storage.copy_template(kept, data, "second")
    assert storage.is_formatted(data)
    assert (data / "log" / "snapshot").read_bytes() == b"voters"
    assert (data / "meta.properties").read_text() == (
        "node.id=1\ncluster.id=second\ndirectory.id=d\n"
    )


@pytest.mark.parametrize("name", ["meta.properties", "log/snapshot"])
def test_what_was_cut_off_is_not_copied(kept: Path, tmp_path: Path, name: str) -> None:
    (kept / name).write_bytes(b"")
    assert not storage.copy_template(kept, tmp_path / "data", "second")
    assert not (tmp_path / "data").exists()


def test_where_none_is_kept_none_is_copied(kept: Path, tmp_path: Path) -> None:
    storage.delete_template(kept)
    assert not storage.copy_template(kept, tmp_path / "data", "second")


def test_a_node_serves_on_a_copy_at_ports_of_its_own(tmp_path: Path, bootstrap: str) -> None:
    """The copy says at which port the controller was that it was made for."""
    settings = BrokerSettings(port=0, heap_mb=256, quick=True, start_timeout_s=200)
    (first, second) = (Broker(settings, tmp_path / name, tethered=True) for name in "ab")
    first.folder.mkdir()
    storage.save_template(first.format(), tmp_path / "kept")
    data = second.folder / "data"
    assert storage.copy_template(tmp_path / "kept", data, "dHJpAAAAQACAAAAAAAAAAA")
    try:
        second.start()
        assert cluster_of(data) == "dHJpAAAAQACAAAAAAAAAAA"
    finally:
        second.reset()
