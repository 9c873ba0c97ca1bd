"""Reads all settings of a deployment: a TOML file, the environment and flags, in rising precedence.

Reads `trivium.toml` of the working directory, or the file that --config or TRIVIUM_CONFIG names. An
unknown section or field stops the start, with its name and what was expected. The engines' sections
are checked here and stay as written: a worker builds the section of its engine.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from infra.broker.section import BrokerSettings
from infra.scaling.settings import ScalingSettings
from schemas.errors import ConfigError
from schemas.sections import ENV_PREFIX, build, read_toml, secrets_of
from schemas.settings import LogSettings, ModelSettings
from streams.bridge.config import BridgeSettings
from streams.calls.config import GatewaySettings
from streams.config import RouterSettings
from workers.config import WorkerSettings, engine_sections
from workers.embed.settings import EmbeddingSettings
from workers.retrieval.settings import RetrievalSettings

DEFAULT_FILE = Path("trivium.toml")
ENGINE_SECTIONS = engine_sections()
_OTHER_VARIABLES = ("TRIVIUM_HOME", "TRIVIUM_CONFIG")
_OWN_PREFIXES = ("TRIVIUM_PLUGIN_",)  # set by our processes for the processes that they start

Flags = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All sections. Each has defaults, so `Settings()` is a deployment on this machine."""

    log: LogSettings = field(default_factory=LogSettings)
    broker: BrokerSettings = field(default_factory=BrokerSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    router: RouterSettings = field(default_factory=RouterSettings)
    bridge: BridgeSettings = field(default_factory=BridgeSettings)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    retrieval: RetrievalSettings = field(default_factory=RetrievalSettings)
    embedding: EmbeddingSettings = field(default_factory=EmbeddingSettings)
    scaling: ScalingSettings = field(default_factory=ScalingSettings)
    engines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


_SECTIONS = {name: kind for name, kind in get_type_hints(Settings).items() if name != "engines"}


def load(
    file: Path | None = None,
    *,
    flags: Flags | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Return the settings. Raises ConfigError that names what is unknown or wrong."""
    environ = os.environ if environ is None else environ
    sections = read_toml(_file(file, environ))
    names = (*_SECTIONS, *ENGINE_SECTIONS)
    for name, content in sections.items():
        if name not in names:
            raise ConfigError(f"[{name}]: unknown section; expected one of {', '.join(names)}")
        if not isinstance(content, dict):
            raise ConfigError(f"{name}: expected a section, [{name}], found {content!r}")
    _check_variables(environ, names)
    flags = flags or {}
    built = {
        name: build(name, kind, sections.get(name, {}), environ=environ, flags=flags.get(name))
        for name, kind in _SECTIONS.items()
    }
    for name, kind in ENGINE_SECTIONS.items():
        build(name, kind, sections.get(name, {}), environ=environ)
    engines = {name: sections[name] for name in ENGINE_SECTIONS if name in sections}
    return Settings(**built, engines=engines)


def dump(settings: Settings) -> str:
    """Return the settings as TOML that `load` can read, without secrets."""
    sections = {}
    for name in _SECTIONS:
        section = getattr(settings, name)
        secrets = secrets_of(section)
        plain = dataclasses.asdict(section).items()
        sections[name] = {key: value for key, value in plain if key not in secrets}
    sections.update({name: dict(content) for name, content in settings.engines.items()})
    lines: list[str] = []
    for name, content in sections.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {_toml(value)}" for key, value in content.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def secrets_environ(settings: Settings) -> dict[str, str]:
    """Return the secrets as environment variables, for processes that read what `dump` wrote."""
    variables = {}
    for name in _SECTIONS:
        for field_name, value in secrets_of(getattr(settings, name)).items():
            text = value if isinstance(value, str) else ",".join(value)
            variables[f"{ENV_PREFIX}{name}_{field_name}".upper()] = text
    return variables


def without_sections(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that `dump` has already merged into the file."""
    prefixes = tuple(f"{ENV_PREFIX}{name.upper()}_" for name in _SECTIONS)
    return {name: value for name, value in environ.items() if not name.startswith(prefixes)}


def _file(file: Path | None, environ: Mapping[str, str]) -> Path | None:
    if file is not None:
        return file
    if config_path := environ.get("TRIVIUM_CONFIG"):
        return Path(config_path)
    return DEFAULT_FILE if DEFAULT_FILE.exists() else None


def _check_variables(environ: Mapping[str, str], names: tuple[str, ...]) -> None:
    for variable in environ:
        if not variable.startswith(ENV_PREFIX) or variable.startswith(_OWN_PREFIXES):
            continue
        if variable in _OTHER_VARIABLES:
            continue
        section = variable.removeprefix(ENV_PREFIX).partition("_")[0].lower()
        if section not in names:
            raise ConfigError(
                f"{variable}: unknown; expected {' or '.join(_OTHER_VARIABLES)}, or "
                f"{ENV_PREFIX}<SECTION>_<FIELD> with a section of {', '.join(names)}"
            )


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        items = ((key, item) for key, item in value.items() if item is not None)
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, bool | int | float):
        return str(value).lower()
    return json.dumps(str(value), ensure_ascii=False)  # a TOML basic string is a JSON string
