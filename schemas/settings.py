"""Settings: frozen dataclasses filled from one TOML file, the environment and flags.

Later sources win. Unknown keys and unparsable values stop the start with the name and what was
expected. Each section of the file is one dataclass; `TRIVIUM_<SECTION>_<FIELD>` overrides a field.
A secret can be in a file of its own, named by the field's name and `_file`; a list has one in each
line. Secrets are never shown, nor written.
This file holds the sections that every process shares; the others live beside the processes that
they configure.
"""

import dataclasses
import os
import stat
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


_SECRET = "secret"
_FILE = "_file"


def secret(default: Any) -> Any:
    """A field that no message, `repr` or file of ours shows."""
    return dataclasses.field(default=default, repr=False, metadata={_SECRET: True})


def secrets_of(section: Any) -> dict[str, Any]:
    """The secrets of a section that are set, by field."""
    names = [f.name for f in dataclasses.fields(section) if _SECRET in f.metadata]
    return {name: getattr(section, name) for name in names if getattr(section, name)}


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
    min_insync_replicas: int = 0  # copies that an acknowledged record has; 0: the majority
    schema_registry: str = secret("")  # URL, perhaps with a password; empty: single-object encoding
    security_protocol: str = "PLAINTEXT"
    sasl_mechanism: str = ""
    sasl_username: str = ""
    sasl_password: str = secret("")
    tls_ca_file: str = ""
    request_timeout_ms: int = 5_000

    def __post_init__(self) -> None:
        for group in ("session", "worker", "gateway", "retrieval", "asker", "document"):
            if self.partitions(group) < 1:
                raise ConfigError(
                    f"log.{group}_partitions: expected at least 1, found {self.partitions(group)}"
                )
        if not 0 <= self.min_insync_replicas <= self.replication_factor:
            raise ConfigError(
                f"log.min_insync_replicas: expected 0 to replication_factor "
                f"{self.replication_factor}, found {self.min_insync_replicas}"
            )
        if not all(map(_is_address, self.bootstrap.split(","))):
            raise ConfigError(
                f"log.bootstrap: expected HOST:PORT, several with commas, found {self.bootstrap!r}"
            )

    @property
    def copies_min(self) -> int:
        """How many brokers have an acknowledged record: of three two, so one may be lost."""
        return self.min_insync_replicas or self.replication_factor // 2 + 1

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
    revision: str = ""  # of a repository: the commit to download
    name: str = ""  # name in the API; empty: the folder's or repository's name
    max_model_len: int = 2_048  # tokens of prompt and answer together

    def __post_init__(self) -> None:
        if self.max_model_len < 2:
            raise ConfigError(
                f"model.max_model_len: expected at least 2, found {self.max_model_len}"
            )

    @property
    def pinned(self) -> str:
        """The revision of what has to be downloaded; raises ConfigError where none is named."""
        if not self.revision:
            raise ConfigError(
                f"model.path: no folder {self.path!r} is here, and for a repository of that name "
                f"model.revision: expected the commit of {self.path!r} to download, found none"
            )
        return self.revision

    @property
    def served_name(self) -> str:
        return self.name or Path(self.path).name


def home() -> Path:
    """The state folder: broker data, logs, process ids and models made here."""
    return Path(os.environ.get("TRIVIUM_HOME", ".trivium")).absolute()


def private_folder(path: Path) -> Path:
    """Make a folder that only its owner can look into; one that is there is closed to others.

    Raises ConfigError for a folder that others may write to, which is not ours to close.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = path.stat().st_mode
    if mode & (stat.S_ISVTX | stat.S_IWOTH):
        raise ConfigError(
            f"{path}: expected a folder of our own, found one that others may write to; name "
            "another with TRIVIUM_HOME"
        )
    if stat.S_IMODE(mode) & 0o077:
        path.chmod(0o700)
    return path


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
    fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, kind))}
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in file.items():
        if own := _own_file(name, fields):
            values[own] = _from_file(f"{section}.{name}", value, hints[own])
        elif name in fields:
            shown = _SECRET not in fields[name].metadata
            values[name] = _typed(f"{section}.{name}", value, hints[name], shown=shown)
        else:
            raise ConfigError(
                f"{section}.{name}: unknown; expected one of {', '.join(sorted(fields))}"
            )
    prefix = f"{ENV_PREFIX}{section.upper()}_"
    for variable, text in environ.items():
        if not variable.startswith(prefix):
            continue
        name = variable.removeprefix(prefix).lower()
        if own := _own_file(name, fields):
            values[own] = _from_file(variable, text, hints[own])
        elif name in fields:
            values[name] = _parsed(variable, text, hints[name])
        else:
            raise ConfigError(f"{variable}: unknown; {section} has {', '.join(sorted(fields))}")
    values.update({name: value for name, value in (flags or {}).items() if value is not None})
    return kind(**values)


def _own_file(name: str, fields: Mapping[str, dataclasses.Field[Any]]) -> str:
    """The secret whose file this names, or nothing."""
    own = name.removesuffix(_FILE)
    known = own != name and own in fields and _SECRET in fields[own].metadata
    return own if known else ""


def _from_file(name: str, path: Any, hint: Any) -> Any:
    try:
        lines = Path(_typed(name, path, str)).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: expected a file with the secret: {error}") from error
    found = [line.strip() for line in lines if line.strip()]
    if typing.get_origin(_plain(hint)) is tuple:
        return tuple(found)
    if len(found) != 1:
        raise ConfigError(f"{name}: expected one line, found {len(found)} in {path}")
    return found[0]


def _plain(hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        return next(arg for arg in hint.__args__ if arg is not type(None))
    return hint


def _typed(name: str, value: Any, hint: Any, *, shown: bool = True) -> Any:
    hint = _plain(hint)
    found = repr(value) if shown else "something else"
    if typing.get_origin(hint) is tuple:
        if isinstance(value, list):
            item_hint = typing.get_args(hint)[0]
            return tuple(
                _typed(f"{name}[{i}]", item, item_hint, shown=shown) for i, item in enumerate(value)
            )
        raise ConfigError(f"{name}: expected a list, found {found}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{name}: expected {hint.__name__}, found {found}")
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
