"""Reads the models of a deployment: one in [model], or several in tables [[models]].

A table has the fields of [model], the counts of the model's workers, and settings of engines that
apply to these workers alone (`[models.vllm]`). Names of models and of adapters are unique together,
because a call names either as its model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from schemas.errors import ConfigError
from schemas.sections import Natural, build, section
from schemas.settings import ALIAS, MODEL_NAME_CHARS_MAX, ModelSettings
from workers.config import engine_sections

SECTION = "models"
COUNTS = ("prefill", "decode", "replica")


@section("models")
class ModelTable(ModelSettings):
    """A table of [[models]] without its engines' settings; None: the command's count."""

    prefill: Natural | None = None
    decode: Natural | None = None
    replica: Natural | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWorkers:
    """What a table says about its model's workers: counts, and fields of the engines' sections."""

    prefill: int | None = None
    decode: int | None = None
    replica: int | None = None
    engines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


Models = tuple[list[ModelSettings], list[ModelWorkers]]


def read_tables(tables: object) -> Models:
    """Return the models of [[models]] in order, with what is set for their workers.

    Raises ConfigError with the number of the table.
    """
    if not isinstance(tables, list) or not tables or not all(isinstance(t, dict) for t in tables):
        raise ConfigError(f"models: expected tables, [[models]], found {tables!r}")
    models, workers = [], []
    for number, content in enumerate(tables, 1):
        try:
            model, its_workers = _read_table(content)
        except ConfigError as error:
            raise ConfigError(f"[[models]], table {number}: {error.message}") from None
        models.append(model)
        workers.append(its_workers)
    return models, workers


def _read_table(content: Mapping[str, Any]) -> tuple[ModelSettings, ModelWorkers]:
    kinds = engine_sections()
    engines = {name: content[name] for name in kinds if name in content}
    for name, values in engines.items():
        if not isinstance(values, dict):
            raise ConfigError(f"models.{name}: expected a table, [models.{name}], found {values!r}")
    plain = {name: value for name, value in content.items() if name not in engines}
    table = build(SECTION, ModelTable, plain, environ={})
    model = ModelSettings(**{f.name: getattr(table, f.name) for f in fields(ModelSettings)})
    counts = {name: getattr(table, name) for name in COUNTS}
    return model, ModelWorkers(**counts, engines=engines)


def write_tables(models: Sequence[Mapping[str, Any]], workers: Sequence[ModelWorkers]) -> Any:
    """Return the content of tables that `read_tables` reads back, from each model's fields."""
    for number, model in enumerate(models):
        its = workers[number] if workers else ModelWorkers()
        yield {**model, **{name: getattr(its, name) for name in COUNTS}, **its.engines}


def engines_of(
    engines: Mapping[str, Mapping[str, Any]], workers: ModelWorkers
) -> dict[str, Mapping[str, Any]]:
    """Return the sections of the engines for the workers of one model."""
    names = dict.fromkeys([*engines, *workers.engines])
    return {name: {**engines.get(name, {}), **workers.engines.get(name, {})} for name in names}


def worker_counts(workers: ModelWorkers, flags: Mapping[str, int | None]) -> dict[str, int]:
    """Return how many workers a model gets, by role: as flags say, or else as its table does.

    Without either, it gets a prefill and a decode worker, unless it has replicas.
    """
    counts = {
        role: getattr(workers, role) if flags.get(role) is None else flags[role] for role in COUNTS
    }
    lone = counts["replica"] and counts["prefill"] is None and counts["decode"] is None
    usual = {"prefill": 0 if lone else 1, "decode": 0 if lone else 1, "replica": 0}
    return {role: usual[role] if count is None else count for role, count in counts.items()}


def with_names(models: Sequence[ModelSettings], engine: str) -> list[ModelSettings]:
    """Return the models with their names in the API filled in, where there are several."""
    if len(models) == 1:
        return list(models)
    return [replace(model, name=name_of(model, engine)) for model in models]


def name_of(model: ModelSettings, engine: str) -> str:
    """Return the model's name in the API: without a name and a path, its engine's default."""
    if model.served_name:
        return model.served_name
    from workers.models.folder import default_path  # only here: it imports tokenizers

    return default_path(engine)


def check_names(models: Sequence[ModelSettings]) -> None:
    """Raise ConfigError for a name that calls could not use, or that two models or adapters have.

    A model without a path has no name yet: it is called as its engine's default.
    """
    owners: dict[str, str] = {}
    for name, owner in _names(models):
        if fault := _fault(name):
            raise ConfigError(f"{owner} has the name {name!r}: {fault}; set another name")
        if name in owners:
            raise ConfigError(
                f"{owner} and {owners[name]} have the same name, {name!r}; calls choose a model "
                "or an adapter by its name, so set another one"
            )
        owners[name] = owner


def _names(models: Sequence[ModelSettings]) -> Iterator[tuple[str, str]]:
    """Yield the names of models and adapters, each with words for its owner."""
    for number, model in enumerate(models, 1):
        words = "the model" if len(models) == 1 else f"model {number}"
        path = f" ({model.path})" if model.path else ""
        if model.served_name:
            yield model.served_name, f"{words}{path}"
        for adapter, folder in model.adapters.items():
            yield adapter, f"the adapter {folder} of {words}{path}"


def _fault(name: str) -> str:
    """Return why calls could not use this name, or an empty text."""
    if not name or len(name) > MODEL_NAME_CHARS_MAX:
        return f"expected 1 to {MODEL_NAME_CHARS_MAX} characters"
    if not name.isprintable() or name != name.strip():
        return "expected no control characters, and no space at its ends"
    if ALIAS in name:
        return f"expected no {ALIAS}, which stands before the name of a collection"
    if {"", ".", ".."} & {*name.split("/")}:
        return "expected a word before and after each slash"
    return ""
