"""Implements `trivium ingest`: writes files as documents; embedding workers then embed them."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import (
    AsJson,
    Bootstrap,
    Config,
    Quiet,
    check_collection,
    settings_of_running,
)
from infra.cli.retrieve.documents import load
from infra.terminal.output import print_json
from schemas.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from infra.ingest.batch import Refusal, SourceReader, Target
    from infra.ingest.watcher import FileChanges
    from schemas.settings import LogSettings
    from streams.log.documents import IngestCounts, Ingester

EXIT_INCOMPLETE = 1


def ingest(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files and folders.")],
    collection: Annotated[
        str, typer.Option("--collection", "-c", help="The collection to add to.")
    ] = "default",
    vectors: Annotated[
        bool, typer.Option("--vectors", help="The files have ready vectors: .npy or .jsonl.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Keep following changes.")] = False,
    tenant: Annotated[str, typer.Option(help="The only tenant that may find them.")] = "",
    metadata: Annotated[str, typer.Option(help="A JSON object, for all of them.")] = "",
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until they are embedded.")
    ] = True,
    config: Config = None,
    bootstrap: Bootstrap = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Add files or vectors to a collection.

    Ingest text, Markdown, HTML, PDF, office files, tables, JSON and source code.

    Unchanged content is not embedded again.

    A document's id is its path relative to the folder, or a file's own name. A line of a .jsonl
    file is `{"id": "a", "text": "...", "title": "...", "metadata": {"year": 2020}}`. Files that
    cannot be read or used are reported, the others are ingested, and the exit code is 1.

    With --vectors, a .npy file has one vector in each row, and the row's number becomes the id. A
    line of a .jsonl file is `{"id": "a", "vector": [0.1, 0.2], "metadata": {"year": 2020},
    "text": "..."}`; metadata and text are optional. Retrieval workers find them at once.

    Examples: `trivium ingest docs -c handbook`, `trivium ingest notes --watch`,
    `trivium ingest --vectors books.jsonl -c books`
    """
    from infra.ingest.batch import SourceReader

    if vectors:
        if watch or tenant or metadata:
            raise ConfigError("--vectors: expected without --watch, --tenant and --metadata")
        check_collection(collection)
        log, shows = settings_of_running(config, bootstrap).log, not (quiet or as_json)
        if not load(paths, collection, log, shows=shows, as_json=as_json):
            sys.exit(EXIT_INCOMPLETE)
        return
    target = _target(collection, tenant, metadata)
    roots = [_there(path) for path in paths]
    log = settings_of_running(config, bootstrap).log
    command = _IngestCommand(
        log, roots, SourceReader(target), shows=not (quiet or as_json), waits=wait
    )
    complete = asyncio.run(command.run(watch=watch))
    if as_json:
        print_json(command.as_dict())
    if not complete:
        sys.exit(EXIT_INCOMPLETE)


def _target(collection: str, tenant: str, metadata: str) -> "Target":
    from infra.ingest.batch import Target
    from schemas.rules.metadata import check_metadata
    from schemas.rules.numbers import float_of

    check_collection(collection)
    try:
        facts = json.loads(metadata or "{}", parse_float=float_of)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--metadata: expected a JSON object: {error}") from error
    if not isinstance(facts, dict):
        raise ConfigError(f"--metadata: expected a JSON object, found {metadata!r:.80}")
    try:
        check_metadata(facts, {})
    except InvalidRequest as error:
        raise ConfigError(f"--{error.message}") from error
    return Target(collection=collection, tenant=tenant, metadata=facts)


def _there(path: Path) -> Path:
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder")
    return path.absolute()


class _IngestCommand:
    """Runs one call of `trivium ingest`."""

    def __init__(
        self,
        log: "LogSettings",
        roots: list[Path],
        reader: "SourceReader",
        *,
        shows: bool,
        waits: bool,
    ) -> None:
        self._log, self._roots, self._reader = log, roots, reader
        self._shows, self._waits = shows, waits
        self._refused: list[Refusal] = []
        self._workers = True
        self._ingester: Ingester | None = None

    async def run(self, *, watch: bool) -> bool:
        """Ingest all files; return whether all were accepted, and embedded if it waits for that."""
        from infra.stack.fleet_watch import FleetWatch
        from streams.log.clock import wall_ms
        from streams.log.documents import Ingester
        from streams.log.registry import make_codec
        from streams.log.retrieval.results import embedding_workers

        codec = await asyncio.to_thread(make_codec, self._log)
        async with FleetWatch(self._log, codec).followed() as fleet:
            self._workers = not self._waits or bool(embedding_workers(fleet.view, wall_ms()))
            ingester = self._ingester = Ingester(self._log, codec, lambda: fleet.view)
            await ingester.start()
            try:
                if watch:
                    await self._all_and_changes(ingester)
                else:
                    await self._all(ingester)
            finally:
                await ingester.stop()
        fates = ingester.counts
        return not (self._refused or fates.refused) and (not self._waits or not fates.waiting)

    async def _all(self, ingester: "Ingester") -> None:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress

        from infra.ingest.files import sources
        from streams.log.clock import wall_ms

        files = await asyncio.to_thread(lambda: list(sources(self._roots)))
        errors = Console(stderr=True)
        hidden = not (self._shows and errors.is_terminal)
        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        with Progress(*columns, console=errors, transient=True, disable=hidden) as progress:
            task = progress.add_task("read", total=len(files))
            for source in files:
                documents, refused = await self._reader.documents(source, wall_ms())
                self._refuse(refused)
                for document in documents:
                    await ingester.put(document)
                progress.advance(task)
            await ingester.flush()
            if self._waits and self._workers:
                task = progress.add_task("embedded", total=ingester.counts.written)
                await ingester.follow(
                    lambda fates: progress.update(task, completed=fates.done_count)
                )
        self._say(ingester.counts)

    async def _all_and_changes(self, ingester: "Ingester") -> None:
        """Ingest all files and then their changes; watching starts first, to miss none."""
        from infra.ingest.watcher import watch_files

        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        async with watch_files(self._roots, self._reader, stop) as changes:
            await self._all(ingester)
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop.set)
            self._print(f"watching {', '.join(map(str, self._roots))}; Ctrl-C ends")
            await self._follow(ingester, changes)

    async def _follow(self, ingester: "Ingester", changes: "AsyncIterator[FileChanges]") -> None:
        async for batch in changes:
            self._refuse(batch.refused)
            for document in batch.documents:
                await ingester.put(document)
            for document_id in batch.deleted_ids:
                await ingester.delete(self._reader.target.collection, document_id)
            await ingester.flush()
            refused_before = len(ingester.counts.refused)
            if self._waits and self._workers:
                await ingester.follow(lambda _: None)
            refused = dict(ingester.counts.refused[refused_before:])
            for name, reason in refused.items():
                print(f"{name}: {reason}", file=sys.stderr)
            for document in batch.documents:
                if document.document_id not in refused:
                    self._print(f"changed: {document.document_id}")
            for document_id in batch.deleted_ids:
                self._print(f"deleted: {document_id}")

    def _refuse(self, refused: "list[Refusal]") -> None:
        self._refused += refused
        for refusal in refused:
            print(f"{refusal.path}: {refusal.reason}", file=sys.stderr)

    def _say(self, fates: "IngestCounts") -> None:
        for name, reason in fates.refused:
            print(f"{name}: {reason}", file=sys.stderr)
        accepted_count = fates.written - len(fates.refused)
        summary = f"collection {self._reader.target.collection}: documents {accepted_count}"
        if self._waits and self._workers:
            summary += (
                f", embedded {fates.embedded} ({fates.passages} passages), "
                f"unchanged {fates.unchanged}"
            )
        if refused := len(self._refused) + len(fates.refused):
            summary += f", refused {refused}"
        self._print(summary)
        if not self._workers:
            print(
                "no embedding worker is alive: the documents wait on the log; start one with "
                "`trivium run embedding`",
                file=sys.stderr,
            )

    def _print(self, text: str) -> None:
        if self._shows:
            print(text, flush=True)

    def as_dict(self) -> dict[str, Any]:
        """Return the result of the command as a JSON object."""
        assert self._ingester is not None, "run first"
        fates = self._ingester.counts
        refused = [{"path": refusal.path, "reason": refusal.reason} for refusal in self._refused]
        refused += [{"path": name, "reason": reason} for name, reason in fates.refused]
        return {
            "collection": self._reader.target.collection,
            "documents": fates.written - len(fates.refused),
            "deleted": fates.deleted,
            "embedded": fates.embedded,
            "passages": fates.passages,
            "unchanged": fates.unchanged,
            "waiting": fates.waiting,
            "refused": refused,
        }
