"""Implements `trivium schemas`: schemas of records, in a registry and since the last release."""

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from infra.cli.options import AsJson, Config, Quiet, settings_from
from infra.terminal.output import print_json, stdout_console
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from schemas.settings import LogSettings

app = typer.Typer(
    help="Register and check schemas of records.",
    no_args_is_help=True,
)
Url = Annotated[
    str | None,
    typer.Option(
        help="Address of a schema registry with Confluent's API.", show_default="the settings'"
    ),
]


@app.command(epilog="Example: trivium schemas register --url http://registry:8081")
def register(config: Config = None, url: Url = None, as_json: AsJson = False) -> None:
    """Register missing schemas; safe to repeat. Every process does so when it starts."""
    from streams.log.registry import register_all

    log = settings_from(config).log
    ids = register_all(
        url or _registry_url(log), prefix=log.topic_prefix, timeout_ms=log.request_timeout_ms
    )
    if as_json:
        print_json(ids)
    else:
        print(f"{len(ids)} subjects are registered, as {len(set(ids.values()))} schemas")


def _check(log: "LogSettings", url: str | None, *, as_json: bool, quiet: bool) -> None:
    """Raise ConfigError, or exit with code 1 as JSON, unless all versions can be read."""
    from schemas.generate.compatibility import incompatibilities

    problems = list(incompatibilities()) if url is None else _breaks_of(log, url)
    if as_json:
        print_json({"breaks": problems})
    elif not problems and not quiet:
        print("every version of every record can be read")
    if problems and not as_json:
        raise ConfigError("; ".join(problems))
    if problems:
        raise typer.Exit(1)


def _breaks_of(log: "LogSettings", url: str) -> list[str]:
    from schemas.codec import full_schema
    from schemas.generate.compatibility import unreadable
    from streams.log.registry import Registry, subjects

    registry = Registry(url, timeout_ms=log.request_timeout_ms)
    there = registry.subjects()
    return [
        f"{subject}: the current version cannot read version {version.number}: {why}"
        for subject, record in subjects(log.topic_prefix).items()
        if subject in there
        for version in registry.versions(subject)
        if (why := unreadable(full_schema(record), version.schema))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A row of the list; `schema_id` and `version` are of the current schema in the registry."""

    subject: str
    record: str
    fingerprint: str
    older: int
    schema_id: int | None = None
    version: int | None = None


@app.command(
    "list",
    epilog="Examples: trivium schemas list --json | jq -r '.[].subject', "
    "trivium schemas list --check --url http://registry:8081",
)
def list_(
    check: Annotated[
        bool,
        typer.Option("--check", help="Fail unless every version of every record can be read."),
    ] = False,
    config: Config = None,
    url: Url = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show every subject with its record, and with a registry, also its id and version there.

    With --check and without --url, the versions of the last release and of schemas/history are
    checked, without any connection. With --url, those in the registry are checked. Nothing is
    written.
    """
    from rich.table import Table

    log = settings_from(config).log
    if check:
        _check(log, url, as_json=as_json, quiet=quiet)
        return
    rows = _subjects(log, url or log.schema_registry)
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    table = Table("subject", "record", "fingerprint", "older", "id", "version", box=None)
    for row in rows:
        number = "-" if row.version is None else str(row.version)
        schema_id = "-" if row.schema_id is None else str(row.schema_id)
        table.add_row(row.subject, row.record, row.fingerprint, str(row.older), schema_id, number)
    stdout_console().print(table)


def _subjects(log: "LogSettings", url: str) -> list[Subject]:
    from schemas.codec import schema_fingerprint
    from schemas.generate.compatibility import current_marks, older_versions
    from streams.log.registry import Registry, subjects

    registry = Registry(url, timeout_ms=log.request_timeout_ms) if url else None
    there = registry.subjects() if registry is not None else set()
    marks, older = current_marks(), older_versions()
    rows = []
    for subject, record in subjects(log.topic_prefix).items():
        row = Subject(
            subject=subject,
            record=record,
            fingerprint=marks[record],
            older=len(older.get(record, {})),
        )
        for version in registry.versions(subject) if registry and subject in there else ():
            if schema_fingerprint(version.schema).hex() == marks[record]:
                row = replace(row, schema_id=version.schema_id, version=version.number)
        rows.append(row)
    return rows


def _registry_url(log: "LogSettings") -> str:
    if not log.schema_registry:
        raise ConfigError("a schema registry: expected --url or log.schema_registry, found neither")
    return log.schema_registry
