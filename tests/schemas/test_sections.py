"""Sections of the settings: precedence of file, environment and flags, and what stops a start."""

from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Annotated, Any

import pytest

from schemas.errors import ConfigError
from schemas.sections import (
    Positive,
    Share,
    Texts,
    build,
    one_of,
    read_toml,
    secret,
    secrets_of,
    section,
)


@section("example")
class Example:
    """One field of every type that a section may have."""

    text: str = "a"
    kind: Annotated[str, one_of("small", "large")] = "small"
    count: Positive = 1
    number: int = 0
    share: Share = 0.5
    on: bool = False
    names: Texts = ()
    limit: int | None = None
    key: str = secret("")
    keys: Texts = secret(())

    def __post_init__(self) -> None:
        if self.number > self.count:
            raise ConfigError(f"example.number: expected at most {self.count}")


def built(
    file: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    flags: dict[str, Any] | None = None,
) -> Example:
    return build("example", Example, file or {}, environ=environ or {}, flags=flags)


def test_section_has_defaults() -> None:
    assert built() == Example()


def test_flags_override_environment_and_file() -> None:
    file = {"count": 2, "text": "file", "share": 0.25}
    environ = {"TRIVIUM_EXAMPLE_COUNT": "3", "TRIVIUM_EXAMPLE_TEXT": "env", "TRIVIUM_LOG_X": "1"}
    assert built(file, environ, {"count": 4, "text": None}) == Example(
        count=4, text="env", share=0.25
    )


EVERY = Example(
    text="b", kind="large", count=2, share=1.0, on=True, names=("p", "q"), limit=3, key="k"
)


def test_section_reads_file_values_of_every_type() -> None:
    file = {
        "text": "b", "kind": "large", "count": 2, "share": 1, "on": True,
        "names": ["p", "q"], "limit": 3, "key": "k",
    }  # fmt: skip
    assert built(file) == EVERY
    assert isinstance(built(file).share, float)


def test_section_reads_environment_values_of_every_type() -> None:
    texts = {
        "TEXT": "b", "KIND": "large", "COUNT": "2", "SHARE": "1", "ON": "Yes",
        "NAMES": "p, q,", "LIMIT": "3", "KEY": "k",
    }  # fmt: skip
    assert built(None, {f"TRIVIUM_EXAMPLE_{name}": text for name, text in texts.items()}) == EVERY


BAD_FILES: list[tuple[dict[str, Any], str]] = [
    ({"cuont": 1}, r"example\.cuont: unknown; expected perhaps count$"),
    ({"zzz": 1}, r"example\.zzz: unknown; expected one of count, key, keys, kind, limit"),
    ({"count": "1"}, r"example\.count: expected a valid integer, found '1'"),
    ({"count": True}, r"example\.count: expected a valid integer, found True"),
    ({"count": 1.5}, r"example\.count: expected a valid integer, found 1\.5"),
    ({"count": 0}, r"example\.count: expected at least 1, found 0"),
    ({"share": "half"}, r"example\.share: expected a valid number, found 'half'"),
    ({"share": True}, r"example\.share: expected a valid number, found True"),
    ({"share": float("nan")}, r"example\.share: expected a finite number, found nan"),
    ({"share": 1.5}, r"example\.share: expected at most 1, found 1\.5"),
    ({"on": 1}, r"example\.on: expected a valid boolean, found 1"),
    ({"text": 5}, r"example\.text: expected a valid string, found 5"),
    ({"kind": "middle"}, r"example\.kind: expected one of small, large, found 'middle'"),
    ({"names": "p"}, r"example\.names: expected a valid tuple, found 'p'"),
    ({"names": ["p", 5]}, r"example\.names\[1\]: expected a valid string, found 5"),
    ({"limit": "3"}, r"example\.limit: expected a valid integer, found '3'"),
    ({"number": 2}, r"example\.number: expected at most 1"),
    ({"count": 0, "on": 1}, r"example\.count: .*; example\.on: "),
]


@pytest.mark.parametrize(("file", "message"), BAD_FILES, ids=[str(f) for f, _ in BAD_FILES])
def test_section_rejects_invalid_file_values(file: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(file)


BAD_ENVIRONMENTS: list[tuple[str, str, str]] = [
    ("TRIVIUM_EXAMPLE_CUONT", "1", "TRIVIUM_EXAMPLE_CUONT: unknown; expected perhaps count"),
    ("TRIVIUM_EXAMPLE_COUNT", "one", "EXAMPLE_COUNT: expected a valid integer, .* found 'one'"),
    ("TRIVIUM_EXAMPLE_COUNT", "0", "TRIVIUM_EXAMPLE_COUNT: expected at least 1, found '0'"),
    ("TRIVIUM_EXAMPLE_SHARE", "", "EXAMPLE_SHARE: expected a valid number, .* found ''"),
    ("TRIVIUM_EXAMPLE_SHARE", "inf", "EXAMPLE_SHARE: expected a finite number, found 'inf'"),
    ("TRIVIUM_EXAMPLE_ON", "maybe", "EXAMPLE_ON: expected a valid boolean, .* found 'maybe'"),
]


@pytest.mark.parametrize(("variable", "text", "message"), BAD_ENVIRONMENTS)
def test_section_rejects_invalid_environment(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(None, {variable: text})


def test_section_checks_values_on_construction() -> None:
    with pytest.raises(ConfigError, match=r"example\.count: expected at least 1, found -1"):
        Example(count=-1)
    with pytest.raises(ConfigError, match=r"example\.number: expected at most 1"):
        replace(Example(), number=2)
    with pytest.raises(FrozenInstanceError):
        Example().count = 2  # type: ignore[misc]  # that is the point


def test_section_never_shows_secrets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Example(key=("hush",), count=0)  # type: ignore[arg-type]  # that is the point
    assert "hush" not in str(caught.value)
    assert "example.key: expected a valid string, found something else" in str(caught.value)
    assert caught.value.__cause__ is None
    assert "hush" not in repr(Example(key="hush"))
    assert secrets_of(Example(key="hush")) == {"key": "hush"}


def test_section_reads_secret_from_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("a\n\n b \n")
    example = built({"keys_file": str(path)})
    assert example.keys == built(None, {"TRIVIUM_EXAMPLE_KEYS_FILE": str(path)}).keys == ("a", "b")
    with pytest.raises(ConfigError, match=r"example\.key_file: expected one line, found 2"):
        built({"key_file": str(path)})
    with pytest.raises(ConfigError, match=r"example\.key_file: expected a file with the secret"):
        built({"key_file": 5})
    with pytest.raises(ConfigError, match=r"example\.text_file: unknown"):
        built({"text_file": str(path)})


def test_read_toml_gives_sections(tmp_path: Path) -> None:
    path = tmp_path / "trivium.toml"
    path.write_text('[example]\ntext = "broker:9092"\ncount = 12\n')
    example = built(read_toml(path)["example"])
    assert (example.text, example.count) == ("broker:9092", 12)
    assert read_toml(None) == {}


def test_read_toml_errors_name_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: no such settings file"):
        read_toml(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[log\n")
    with pytest.raises(ConfigError, match=r"broken\.toml: expected TOML"):
        read_toml(broken)
