"""Settings: frozen dataclasses filled from one TOML file, the environment and flags.

Later sources win. Unknown keys and unparsable values stop the start with the name and what was
expected. Each section of the file is one dataclass; `TRIVIUM_<SECTION>_<FIELD>` overrides a field.
This file holds the sections that every process shares; the others live beside the processes that
they configure.
"""

import dataclasses
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from schemas.errors import ConfigError

Section = TypeVar("Section")
ENV_PREFIX = "TRIVIUM_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _is_address(text: str) -> bool:
    host, _, port = text.strip().rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """Section [log]: the Kafka cluster, topic names and framing."""

    bootstrap: str = "127.0.0.1:9092"
    topic_prefix: str = ""
    session_partitions: int = 2  # routers at most; each costs every fetch of every router
    worker_partitions: int = 16  # workers per topic at most
    gateway_partitions: int = 8  # gateways at most
    retrieval_partitions: int = 4  # replicas of a retrieval shard at most
    asker_partitions: int = 16  # routers, decode workers and others that ask, at most
    document_partitions: int = 2
    replication_factor: int = 1
    schema_registry: str = ""  # URL; empty: single-object encoding
    security_protocol: str = "PLAINTEXT"
    sasl_mechanism: str = ""
    sasl_username: str = ""
    sasl_password: str = ""
    tls_ca_file: str = ""
    request_timeout_ms: int = 5_000

    def __post_init__(self) -> None:
        for group in ("session", "worker", "gateway", "retrieval", "asker", "document"):
            if self.partitions(group) < 1:
                raise ConfigError(
                    f"log.{group}_partitions: expected at least 1, found {self.partitions(group)}"
                )
        if not all(map(_is_address, self.bootstrap.split(","))):
            raise ConfigError(
                f"log.bootstrap: expected HOST:PORT, several with commas, found {self.bootstrap!r}"
            )

    def partitions(self, group: str) -> int:
        """Partition count of a topic group of the table."""
        return {
            "session": self.session_partitions,
            "worker": self.worker_partitions,
            "gateway": self.gateway_partitions,
            "retrieval": self.retrieval_partitions,
            "asker": self.asker_partitions,
            "document": self.document_partitions,
            "single": 1,
        }[group]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Section [model]: what is served. One deployment serves one model."""

    path: str = "tiny"  # a Hugging Face folder or name; "tiny" is made locally
    name: str = ""  # name in the API; empty: the folder's or repository's name
    max_model_len: int = 2_048  # tokens of prompt and answer together

    def __post_init__(self) -> None:
        if self.max_model_len < 2:
            raise ConfigError(
                f"model.max_model_len: expected at least 2, found {self.max_model_len}"
            )

    @property
    def served_name(self) -> str:
        return self.name or Path(self.path).name


def home() -> Path:
    """The state folder: broker data, logs, process ids and models made here."""
    return Path(os.environ.get("TRIVIUM_HOME", ".trivium")).absolute()


def read_toml(path: Path | None) -> dict[str, dict[str, Any]]:
    """Sections of the file; an absent path is an empty file."""
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
    """One section: file values, then environment, then flags that are not None.

    Raises ConfigError for unknown names and values of the wrong type.
    """
    environ = os.environ if environ is None else environ
    hints = typing.get_type_hints(kind)
    fields = {f.name for f in dataclasses.fields(typing.cast(Any, kind))}
    values: dict[str, Any] = {}
    for name, value in file.items():
        if name not in fields:
            raise ConfigError(
                f"{section}.{name}: unknown; expected one of {', '.join(sorted(fields))}"
            )
        values[name] = _typed(f"{section}.{name}", value, hints[name])
    prefix = f"{ENV_PREFIX}{section.upper()}_"
    for variable, text in environ.items():
        if not variable.startswith(prefix):
            continue
        name = variable.removeprefix(prefix).lower()
        if name not in fields:
            raise ConfigError(f"{variable}: unknown; {section} has {', '.join(sorted(fields))}")
        values[name] = _parsed(variable, text, hints[name])
    values.update({name: value for name, value in (flags or {}).items() if value is not None})
    return kind(**values)


def _plain(hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        return next(arg for arg in hint.__args__ if arg is not type(None))
    return hint


def _typed(name: str, value: Any, hint: Any) -> Any:
    hint = _plain(hint)
    if typing.get_origin(hint) is tuple:
        if isinstance(value, list):
            item_hint = typing.get_args(hint)[0]
            return tuple(_typed(f"{name}[{i}]", item, item_hint) for i, item in enumerate(value))
        raise ConfigError(f"{name}: expected a list, found {value!r}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{name}: expected {hint.__name__}, found {value!r}")
    return value


def _parsed(variable: str, text: str, hint: Any) -> Any:
    hint = _plain(hint)
    if typing.get_origin(hint) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if hint is bool:
        if text.lower() in _TRUE + _FALSE:
            return text.lower() in _TRUE
        raise ConfigError(f"{variable}: expected true or false, found {text!r}")
    try:
        return hint(text)
    except ValueError as error:
        raise ConfigError(f"{variable}: expected {hint.__name__}, found {text!r}") from error
