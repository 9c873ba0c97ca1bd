"""The storage of a new node is a copy, with a cluster of its own, of one that is whole."""

import re
from pathlib import Path

import pytest

from infra.broker import storage
from infra.broker.node import Broker
from infra.broker.section import BrokerSettings


def cluster_of(data: Path) -> str:
    id_match = re.search(
        r"^cluster\.id=(.+)$", (data / "meta.properties").read_text(), re.MULTILINE
    )
    assert id_match is not None
    return id_match[1]


@pytest.fixture
def template(tmp_path: Path) -> Path:
    source = tmp_path / "made"
    (source / "log").mkdir(parents=True)
    (source / "log" / "snapshot").write_bytes(b"voters")
    (source / "meta.properties").write_text("node.id=1\ncluster.id=first\ndirectory.id=d\n")
    template = tmp_path / "kept"
    storage.save_template(source, template)
    return template


def test_template_copy_changes_only_cluster_id(template: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert not storage.is_formatted(data)
    assert storage.copy_template(template, data, "second")
    assert storage.is_formatted(data)
    assert (data / "log" / "snapshot").read_bytes() == b"voters"
    assert (data / "meta.properties").read_text() == (
        "node.id=1\ncluster.id=second\ndirectory.id=d\n"
    )


@pytest.mark.parametrize("name", ["meta.properties", "log/snapshot"])
def test_truncated_template_is_not_copied(template: Path, tmp_path: Path, name: str) -> None:
    (template / name).write_bytes(b"")
    assert not storage.copy_template(template, tmp_path / "data", "second")
    assert not (tmp_path / "data").exists()


def test_copy_template_without_template_returns_false(template: Path, tmp_path: Path) -> None:
    storage.delete_template(template)
    assert not storage.copy_template(template, tmp_path / "data", "second")


def test_broker_serves_template_copy_at_own_ports(tmp_path: Path, bootstrap: str) -> None:
    """The copy names the controller's port of the node that it was made for."""
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
