"""The AOT cache that set-up makes; `tests/infra/broker/test_node.py` has brokers that use it."""

from pathlib import Path

import pytest

from infra.stack import aot_cache
from schemas.errors import BrokerUnavailable


def test_failed_aot_dump_is_reported_and_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def cut(draft: Path) -> None:
        draft.write_bytes(b"half")
        raise BrokerUnavailable("the broker ended")

    cache = tmp_path / "kafka.aot"
    for dump in (cut, lambda draft: None):
        monkeypatch.setattr(aot_cache, "_dump", dump)
        aot_cache.make(cache)
        assert "no AOT cache of Kafka was made" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())
