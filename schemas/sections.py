"""Defines sections of the settings, and fills them from a file, the environment and flags.

Later sources win; `TRIVIUM_<SECTION>_<FIELD>` overrides a field of the TOML file. Fields have their
types and ranges, which pydantic checks; an unknown name or a wrong value stops the start with the
name, the expected and the found value. A secret can be in a file of its own, named by the field's
name and `_file`; a list of secrets has one in each line. A list of tables (`[[section.field]]`) is
JSON in the environment. Secrets are never shown or written. The sections themselves are beside the
processes that they configure. This is not pydantic-settings: its classes read the environment
wherever one is made, its messages do not name the variable, and its import takes as long again.
"""

import dataclasses
import functools
import json
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, dataclass_transform, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from schemas.errors import ConfigError

Section = TypeVar("Section")
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Port = Annotated[int, Field(ge=0, le=65_535)]  # 0: any free port
Texts = Annotated[tuple[str, ...], Strict(False)]  # a list in a file
ENV_PREFIX = "TRIVIUM_"
_CHECKS = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_SECRET = "secret"
_FILE = "_file"
_WORDS = {  # pydantic's words, and ours
    "Input should be": "expected",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
    "Unexpected keyword argument": "unknown name",
    "Field required": "missing",
}


def one_of(*texts: str) -> AfterValidator:
    """Return a field's validator for one of these texts: `Annotated[str, one_of("a", "b")]`."""

    def check(text: str) -> str:
        if text not in texts:
            raise PydanticCustomError(
                "one_of", "expected one of {texts}", {"texts": ", ".join(texts)}
            )
        return text

    return AfterValidator(check)


def tables_of(kind: type[Any]) -> BeforeValidator:
    """Return the validator of a field with tables of a file, each a section of its own:
    `Annotated[tuple[Pair, ...], tables_of(Pair)]`."""

    def convert(tables: Any) -> Any:
        if not isinstance(tables, list | tuple):
            return tables
        return tuple(_table(kind, table, i) for i, table in enumerate(tables, 1))

    return BeforeValidator(convert)


def _table(kind: type[Any], table: Any, number: int) -> Any:
    if not isinstance(table, dict):
        return table
    try:
        return kind(**table)
    except ConfigError as error:
        raise ConfigError(f"table {number}: {error.message}") from None


@dataclass_transform(frozen_default=True, kw_only_default=True)
def section(name: str) -> Callable[[type[Section]], type[Section]]:
    """Return a class decorator: it makes a frozen dataclass that raises ConfigError for wrong
    values. `__post_init__` checks what concerns several fields."""

    def decorate(cls: type[Section]) -> type[Section]:
        kind: Any = dataclass(cls, frozen=True, slots=True, kw_only=True, config=_CHECKS)
        checked_init = kind.__init__

        def __init__(self: Any, **values: Any) -> None:
            try:
                checked_init(self, **values)
            except ValidationError as error:
                raise ConfigError(describe_errors(f"{name}.", error, _secret_names(kind))) from None

        kind.__init__ = __init__  # raises our errors
        return cast(type[Section], kind)

    return decorate


def describe_errors(
    prefix: str, error: ValidationError, secret_names: frozenset[str] = frozenset()
) -> str:
    """Return all errors in one text: each value's name, what was expected and what was found."""
    messages = []
    for detail in error.errors(include_url=False):
        expected = detail["msg"]
        for word, ours in _WORDS.items():
            expected = expected.replace(word, ours)
        field, *items = detail["loc"] or ("",)
        place = f"{prefix}{field}" + "".join(map(_place, items))
        actual = "something else" if field in secret_names else repr(detail["input"])
        messages.append(f"{place}: {expected}, found {actual}")
    return "; ".join(messages)


def _place(item: int | str) -> str:
    return f"[{item}]" if isinstance(item, int) else f".{item}"


def secret(default: Any) -> Any:
    """Return a field that no message, `repr` or file of ours shows."""
    return dataclasses.field(default=default, repr=False, metadata={_SECRET: True})


def _secret_names(kind: Any) -> frozenset[str]:
    return frozenset(f.name for f in dataclasses.fields(kind) if _SECRET in f.metadata)


def secrets_of(section: Any) -> dict[str, Any]:
    """Return the secrets of a section that are set, by field."""
    values = {name: getattr(section, name) for name in sorted(_secret_names(section))}
    return {name: value for name, value in values.items() if value}


# Variables that programs need to run; Java and Kafka have settings of their own.
_OF_PROGRAMS = ("PYTHON", "LC_", "LD_", "JAVA", "KAFKA_", "COVERAGE_", "OMP_", "TOKENIZERS_")
_FOR_PROGRAMS = frozenset(("PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV"))


def environment_of_child() -> dict[str, str]:
    """Return the environment of a process that reads no settings, without any secrets."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _FOR_PROGRAMS or name.startswith(_OF_PROGRAMS)
    }


def read_toml(path: Path | None) -> dict[str, dict[str, Any]]:
    """Return the sections of the file; None is an empty file. Raise ConfigError."""
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such settings file") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: expected TOML: {error}") from error


def build(
    section: str,
    kind: type[Section],
    file: Mapping[str, Any],
    *,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Section:
    """Return one section: file values, then environment, then flags that are not None.

    Raises ConfigError for unknown names and for values that the section does not accept.
    """
    values: dict[str, Any] = {}
    for name, value in file.items():
        values |= _read(f"{section}.{name}", name, value, kind, is_text=False)
    prefix = f"{ENV_PREFIX}{section}_".upper()
    for variable, text in (os.environ if environ is None else environ).items():
        if variable.startswith(prefix):
            name = variable.removeprefix(prefix).lower()
            values |= _read(variable, name, text, kind, is_text=True)
    values |= {name: value for name, value in (flags or {}).items() if value is not None}
    return kind(**values)


@functools.cache
def _types(kind: Any) -> dict[str, Any]:
    """Return a section's field types; cached, because they cost more than the rest of a file."""
    return get_type_hints(kind)


def _read(place: str, name: str, value: Any, kind: Any, *, is_text: bool) -> dict[str, Any]:
    """Return the field that a name means, with its value; the environment has only texts."""
    types, field_name = _types(kind), name.removesuffix(_FILE)
    if field_name != name and field_name in _secret_names(kind):
        return {
            field_name: _from_file(place, value, is_list=get_origin(types[field_name]) is tuple)
        }
    if name not in types:
        import difflib  # only here, to start sooner

        near = difflib.get_close_matches(name, types)
        names = ", ".join(near or sorted(types))
        raise ConfigError(f"{place}: unknown; expected {'perhaps' if near else 'one of'} {names}")
    if not is_text:
        return {name: value}
    if types[name] == tuple[str, ...]:
        return {name: tuple(part.strip() for part in value.split(",") if part.strip())}
    if get_origin(types[name]) is tuple:  # a list of tables
        return {name: _from_json(place, value)}
    try:
        adapter = TypeAdapter(get_type_hints(kind, include_extras=True)[name], config=_CHECKS)
        return {name: adapter.validate_strings(value, strict=False)}
    except ValidationError as error:
        raise ConfigError(describe_errors(place, error)) from None


def _from_json(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{place}: expected a list of tables as JSON: {error}") from None


def _from_file(place: str, path: Any, *, is_list: bool) -> str | tuple[str, ...]:
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{place}: expected a file with the secret: {error}") from error
    texts = tuple(line.strip() for line in lines if line.strip())
    if is_list:
        return texts
    if len(texts) != 1:
        raise ConfigError(f"{place}: expected one line, found {len(texts)} in {path}")
    return texts[0]
