"""Reads all settings of a deployment: a TOML file, the environment and flags, in rising precedence.

Reads `trivium.toml` of the working directory, or the file that --config or TRIVIUM_CONFIG names. An
unknown section or field stops the start, with its name and what was expected. The engines' sections
are checked here and stay as written: a worker builds the section of its engine.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from infra.broker.section import BrokerSettings
from infra.scaling.settings import ScalingSettings
from infra.stack.models import tables
from infra.stack.models.tables import ModelWorkers
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
    model: ModelSettings = field(default_factory=ModelSettings)  # of calls that name none
    other_models: tuple[ModelSettings, ...] = ()
    model_workers: tuple[ModelWorkers, ...] = ()  # by model, as in `models`; empty: nothing is set
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    router: RouterSettings = field(default_factory=RouterSettings)
    bridge: BridgeSettings = field(default_factory=BridgeSettings)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    retrieval: RetrievalSettings = field(default_factory=RetrievalSettings)
    embedding: EmbeddingSettings = field(default_factory=EmbeddingSettings)
    scaling: ScalingSettings = field(default_factory=ScalingSettings)
    engines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def models(self) -> tuple[ModelSettings, ...]:
        """Return all models of the deployment; calls that name none get the first."""
        return (self.model, *self.other_models)

    def with_models(self, models: Sequence[ModelSettings]) -> "Settings":
        """Return the settings with these models instead, in the same order."""
        return dataclasses.replace(self, model=models[0], other_models=tuple(models[1:]))

    def for_model(self, name: str) -> "Settings":
        """Return the settings for the workers of one model: it alone, and its engine's settings.

        Without a name it is the first model. Raises ConfigError for a name that no model has.
        """
        number = 0
        if name:
            names = [tables.name_of(model, self.worker.engine) for model in self.models]
            if name not in names:
                raise ConfigError(f"model: expected one of {', '.join(names)}, found {name!r}")
            number = names.index(name)
        return dataclasses.replace(
            self,
            model=self.models[number],
            other_models=(),
            model_workers=(),
            engines=tables.engines_of(self.engines, self._workers[number]),
        )

    def worker_counts(self, flags: Mapping[str, int | None]) -> dict[str, dict[str, int]]:
        """Return the workers of each model by role, by its name; flags apply to every model."""
        return {
            model.served_name: tables.worker_counts(workers, flags)
            for model, workers in zip(self.models, self._workers, strict=True)
        }

    @property
    def _workers(self) -> tuple[ModelWorkers, ...]:
        return self.model_workers or (ModelWorkers(),) * len(self.models)


_NO_SECTIONS = ("engines", "other_models", "model_workers")
_SECTIONS = {
    name: kind for name, kind in get_type_hints(Settings).items() if name not in _NO_SECTIONS
}


def load(
    file: Path | None = None,
    *,
    flags: Flags | None = None,
    models: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Return the settings. Raises ConfigError that names what is unknown or wrong.

    With `models`, there is one model for each of these paths; the other fields of [model] are the
    same for all.
    """
    environ = os.environ if environ is None else environ
    sections = read_toml(_file(file, environ))
    names = (*_SECTIONS, *ENGINE_SECTIONS)
    for name, content in sections.items():
        if name == tables.SECTION:
            continue
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
    engines = {name: sections[name] for name in ENGINE_SECTIONS if name in sections}
    settings = Settings(**built, engines=engines)
    _check_engines(settings, environ)
    if tables.SECTION in sections:
        _check_one_source(sections, environ, [*models, *_values(flags.get("model"))])
        settings = _with_tables(settings, sections[tables.SECTION], environ)
    elif models:
        settings = settings.with_models(
            [dataclasses.replace(settings.model, path=path) for path in models]
        )
    settings = settings.with_models(tables.with_names(settings.models, settings.worker.engine))
    tables.check_names(settings.models)
    return settings


def _with_tables(settings: Settings, content: object, environ: Mapping[str, str]) -> Settings:
    """Return the settings with the models of [[models]], whose engines' settings are checked."""
    models, workers = tables.read_tables(content)
    settings = settings.with_models(models)
    for number, its_workers in enumerate(workers, 1):
        engines = tables.engines_of(settings.engines, its_workers)
        try:
            _check_engines(dataclasses.replace(settings, engines=engines), environ)
        except ConfigError as error:
            raise ConfigError(f"[[models]], table {number}: {error.message}") from None
    if all(its_workers == ModelWorkers() for its_workers in workers):
        return settings
    return dataclasses.replace(settings, model_workers=tuple(workers))


def _check_engines(settings: Settings, environ: Mapping[str, str]) -> None:
    for name, kind in ENGINE_SECTIONS.items():
        build(name, kind, settings.engines.get(name, {}), environ=environ)


def _check_one_source(
    sections: Mapping[str, Any], environ: Mapping[str, str], flags: Sequence[str]
) -> None:
    """Raise ConfigError if something beside [[models]] says which model is served."""
    prefix = f"{ENV_PREFIX}MODEL_"
    also = ["[model]"] if "model" in sections else []
    also += [variable for variable in environ if variable.startswith(prefix)]
    also += ["--model or --revision"] if flags else []
    if also:
        raise ConfigError(
            f"{also[0]}: expected with one model, and the settings file has [[models]]; set it in "
            "those tables, or remove them"
        )


def _values(flags: Mapping[str, Any] | None) -> list[Any]:
    return [value for value in (flags or {}).values() if value is not None]


def dump(settings: Settings) -> str:
    """Return the settings as TOML that `load` can read, without secrets."""
    sections = {}
    for name in _SECTIONS:
        section = getattr(settings, name)
        secrets = secrets_of(section)
        plain = dataclasses.asdict(section).items()
        sections[name] = {key: value for key, value in plain if key not in secrets}
    sections.update({name: dict(content) for name, content in settings.engines.items()})
    contents = [(f"[{name}]", content) for name, content in sections.items() if name != "model"]
    if len(settings.models) == 1 and not settings.model_workers:
        contents.append(("[model]", sections["model"]))
    else:
        models = map(dataclasses.asdict, settings.models)
        its_tables = tables.write_tables(list(models), settings.model_workers)
        contents += [(f"[[{tables.SECTION}]]", content) for content in its_tables]
    lines: list[str] = []
    for head, content in contents:
        lines.append(head)
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
