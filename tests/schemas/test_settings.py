"""The sections that every process shares, and the state folder."""

from pathlib import Path

import pytest

from schemas.errors import ConfigError
from schemas.sections import build
from schemas.settings import LogSettings, ModelSettings
from schemas.state_folder import home


@pytest.mark.parametrize("name", ["session_partitions", "worker_partitions", "gateway_partitions"])
def test_log_settings_reject_zero_partitions(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"log\.{name}: expected at least 1, found 0"):
        build("log", LogSettings, {name: 0}, environ={})


def test_log_settings_give_partitions_of_group() -> None:
    log = LogSettings(session_partitions=2, worker_partitions=3, gateway_partitions=5)
    groups = ("session", "worker", "gateway", "single")
    assert [log.partitions(group) for group in groups] == [2, 3, 5, 1]


def test_model_settings_give_served_name_and_check_length() -> None:
    assert ModelSettings(path="org/Model-1B").served_name == "Model-1B"
    assert ModelSettings(path="/models/x", name="y").served_name == "y"
    with pytest.raises(ConfigError, match=r"model\.max_model_len: expected at least 2, found 1"):
        ModelSettings(max_model_len=1)


def test_home_follows_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRIVIUM_HOME", str(tmp_path))
    assert home() == tmp_path
    monkeypatch.delenv("TRIVIUM_HOME")
    monkeypatch.chdir(tmp_path)
    assert home() == tmp_path / ".trivium"
