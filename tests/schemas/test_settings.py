"""Settings: precedence of file, environment and flags, and what stops a start."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import ConfigError
from schemas.settings import LogSettings, ModelSettings, build, home, read_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One field of every type that a section may have."""

    text: str = "a"
    count: int = 1
    share: float = 0.5
    on: bool = False
    folder: Path = Path("x")
    names: tuple[str, ...] = ()
    limit: int | None = None


def built(
    file: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    flags: dict[str, Any] | None = None,
) -> Example:
    return build("example", Example, file or {}, environ=environ or {}, flags=flags)


def test_defaults() -> None:
    assert built() == Example()


def test_later_sources_win() -> None:
    file = {"count": 2, "text": "file", "share": 0.25}
    environ = {"TRIVIUM_EXAMPLE_COUNT": "3", "TRIVIUM_EXAMPLE_TEXT": "env", "TRIVIUM_LOG_X": "1"}
    assert built(file, environ, {"count": 4, "text": None}) == Example(
        count=4, text="env", share=0.25
    )


def test_file_values_of_every_type() -> None:
    file = {
        "text": "b", "count": 2, "share": 1, "on": True,
        "folder": "y", "names": ["p", "q"], "limit": 3,
    }  # fmt: skip
    assert built(file) == Example(
        text="b", count=2, share=1.0, on=True, folder=Path("y"), names=("p", "q"), limit=3
    )
    assert isinstance(built(file).share, float)


def test_environment_values_of_every_type() -> None:
    texts = {
        "TEXT": "b", "COUNT": "2", "SHARE": "1", "ON": "Yes",
        "FOLDER": "y", "NAMES": "p, q,", "LIMIT": "3",
    }  # fmt: skip
    environ = {f"TRIVIUM_EXAMPLE_{name}": text for name, text in texts.items()}
    assert built(None, environ) == Example(
        text="b", count=2, share=1.0, on=True, folder=Path("y"), names=("p", "q"), limit=3
    )


BAD_FILES: list[tuple[dict[str, Any], str]] = [
    ({"cuont": 1}, r"example\.cuont: unknown; expected one of count, folder, limit"),
    ({"count": "1"}, r"example\.count: expected int, found '1'"),
    ({"count": True}, r"example\.count: expected int, found True"),
    ({"count": 1.5}, r"example\.count: expected int, found 1\.5"),
    ({"share": "half"}, r"example\.share: expected float, found 'half'"),
    ({"share": True}, r"example\.share: expected float, found True"),
    ({"on": 1}, r"example\.on: expected bool, found 1"),
    ({"text": 5}, r"example\.text: expected str, found 5"),
    ({"folder": 5}, r"example\.folder: expected Path, found 5"),
    ({"names": "p"}, r"example\.names: expected a list, found 'p'"),
    ({"limit": "3"}, r"example\.limit: expected int, found '3'"),
]


@pytest.mark.parametrize(("file", "message"), BAD_FILES, ids=[str(f) for f, _ in BAD_FILES])
def test_bad_file_values_stop_the_start(file: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(file)


BAD_ENVIRONMENTS: list[tuple[str, str, str]] = [
    ("TRIVIUM_EXAMPLE_CUONT", "1", "TRIVIUM_EXAMPLE_CUONT: unknown; example has count, folder"),
    ("TRIVIUM_EXAMPLE_COUNT", "one", "TRIVIUM_EXAMPLE_COUNT: expected int, found 'one'"),
    ("TRIVIUM_EXAMPLE_SHARE", "", "TRIVIUM_EXAMPLE_SHARE: expected float, found ''"),
    ("TRIVIUM_EXAMPLE_ON", "maybe", "TRIVIUM_EXAMPLE_ON: expected true or false, found 'maybe'"),
]


@pytest.mark.parametrize(("variable", "text", "message"), BAD_ENVIRONMENTS)
def test_bad_environment_stops_the_start(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(None, {variable: text})


def test_toml_is_read_by_section(tmp_path: Path) -> None:
    path = tmp_path / "trivium.toml"
    path.write_text('[log]\nbootstrap = "broker:9092"\nsession_partitions = 12\n')
    log = build("log", LogSettings, read_toml(path)["log"], environ={})
    assert (log.bootstrap, log.session_partitions) == ("broker:9092", 12)
    assert read_toml(None) == {}


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: no such settings file"):
        read_toml(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[log\n")
    with pytest.raises(ConfigError, match=r"broken\.toml: expected TOML"):
        read_toml(broken)


@pytest.mark.parametrize("name", ["session_partitions", "worker_partitions", "gateway_partitions"])
def test_partition_counts_are_at_least_one(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"log\.{name}: expected at least 1, found 0"):
        build("log", LogSettings, {name: 0}, environ={})


def test_partition_groups() -> None:
    log = LogSettings(session_partitions=2, worker_partitions=3, gateway_partitions=5)
    groups = ("session", "worker", "gateway", "single")
    assert [log.partitions(group) for group in groups] == [2, 3, 5, 1]


def test_model_settings() -> None:
    assert ModelSettings(path="org/Model-1B").served_name == "Model-1B"
    assert ModelSettings(path="/models/x", name="y").served_name == "y"
    with pytest.raises(ConfigError, match=r"model\.max_model_len: expected at least 2, found 1"):
        ModelSettings(max_model_len=1)


def test_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRIVIUM_HOME", str(tmp_path))
    assert home() == tmp_path
    monkeypatch.delenv("TRIVIUM_HOME")
    monkeypatch.chdir(tmp_path)
    assert home() == tmp_path / ".trivium"
