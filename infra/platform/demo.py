"""Runs `trivium demo --platform`: a database with searchable rows, whose questions get answers.

It starts PostgreSQL, Kafka Connect with Debezium's connectors, and a stack, each in its own folder.
Rows of `documents` go to the index. Rows of `questions` become prompts, and the answers are written
into them. Then it edits one row, edits others, deletes one, and asks many questions at once. At the
end everything is stopped and deleted, also after an error.
"""

import asyncio
import dataclasses
import json
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from infra.demo.documents import text_of
from infra.demo.main import settings_of, start
from infra.handbook.handbook import Page, handbook, questions
from infra.handbook.library import Library, TextDocument, library
from infra.platform.connect import connectors
from infra.platform.connect.worker import Connect
from infra.platform.postgres import DATABASE, Postgres
from infra.platform.tables import (
    COLUMNS,
    DOCUMENTS_PUBLICATION,
    QUESTIONS_PUBLICATION,
    SINK_ROLE,
    SOURCE_ROLE,
    DemoTables,
    QuestionRow,
)
from infra.stack.configuration import Settings
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from infra.terminal.output import stdout_console
from schemas.errors import EngineFailed
from schemas.state_folder import home
from streams.bridge.config import BridgeSettings, DocumentSource, TopicPair
from streams.log.clock import wall_ms

COLLECTION = "handbook"
PREFIX = "rows"  # of the topics of both tables
PAGES, EDITS, LOAD = 30, 30, 40
_ANSWER_TOKENS = 40
_FOUND_S, _ANSWERED_S, _LOOK_S = 60.0, 120.0, 0.1
_AIM_MS = 2_000  # from the commit of an edit until a search finds it


@dataclass(slots=True)
class PlatformDemoStats:
    """The results of the platform demo, as its JSON report shows them."""

    right: int = 0  # of the first three answers
    edit_cited: bool = False
    edit_answered: bool = False
    edit_cited_ms: float = 0.0  # from the commit of the edit to the cited answer in the table
    found_ms: list[float] = field(default_factory=list)  # from each edit's commit until it is found
    delete_gone: bool = False
    deleted_ms: float = 0.0
    answers: int = 0  # of the questions that were asked at once
    errors: int = 0
    answers_per_s: float = 0.0
    took_s: float = 0.0

    @property
    def found_ms_p50(self) -> float:
        return statistics.median(self.found_ms)

    @property
    def found_ms_p99(self) -> float:
        return statistics.quantiles(self.found_ms, n=100, method="inclusive")[98]

    def is_good(self, *, reads: bool) -> bool:
        """Return whether all steps succeeded; a simulated model does not read what it cites."""
        answered = self.right > 0 and self.edit_answered
        complete = self.answers == LOAD and not self.errors
        return self.edit_cited and self.delete_gone and complete and (answered or not reads)


def run(*, engine: str = "vllm", as_json: bool = False) -> int:
    """Run the demo; return 0 if every step succeeded."""
    console = Console(stderr=True) if as_json else stdout_console()
    began_s = time.monotonic()
    stats = asyncio.run(_demo(engine, console))
    stats.took_s = time.monotonic() - began_s
    good = stats.is_good(reads=engine == "vllm")
    _conclude(stats, console, good=good)
    if as_json:
        report = {"good": good, **dataclasses.asdict(stats)}
        report |= {"found_ms_p50": stats.found_ms_p50, "found_ms_p99": stats.found_ms_p99}
        Console().print_json(json.dumps(report))
    return 0 if good else 1


async def _demo(engine: str, console: Console) -> PlatformDemoStats:
    stats = PlatformDemoStats()
    async with platform(engine, console) as (tables, books, connect):
        pages = handbook(PAGES)
        await _load(tables, books, pages, console)
        await _first_answers(tables, pages[0], stats, console)
        await _edit(tables, books, pages[0], stats, console)
        await _many_edits(tables, books, pages[1:], stats, console)
        await _delete(tables, books, pages[1], stats, console)
        await _many_questions(tables, pages[2:], stats, console)
        await connect.check("documents", "questions", "answers")
        console.print("stopping: connectors, database, workers, broker", style="dim")
    return stats


@asynccontextmanager
async def platform(
    engine: str, console: Console
) -> AsyncIterator[tuple[DemoTables, Library, Connect]]:
    """Start everything and connect it; stop and delete it at the end."""
    folder = home() / "platform"
    shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed
    async with AsyncExitStack() as opened:
        opened.callback(shutil.rmtree, folder, ignore_errors=True)
        console.print("[bold]1  PostgreSQL[/bold], a new server with two tables", highlight=False)
        database = await opened.enter_async_context(Postgres())
        tables = DemoTables(database)
        await tables.create()
        console.print("[bold]2  Trivium[/bold], with a bridge", highlight=False)
        stack = Stack(_settings(engine), _plan(), folder=folder)
        opened.push_async_callback(stack.stop, grace_s=20)
        await start(stack, console)
        console.print("[bold]3  Kafka Connect[/bold] with three connectors", highlight=False)
        connecting = Connect(stack.bootstrap, folder / "connect")
        connect = await opened.enter_async_context(connecting)
        await _connect(connect, database, stack)
        books = await opened.enter_async_context(library(stack.settings.log))
        yield tables, books, connect


def _plan() -> StackPlan:
    return StackPlan(prefill=0, decode=0, replica=1, retrieval=1, embedding=1, bridges=1)


def _settings(engine: str) -> Settings:
    """Return defaults on free ports, with a bridge for both tables."""
    bridge = BridgeSettings(
        documents=(
            DocumentSource(
                topic=f"{PREFIX}.documents",
                collection=COLLECTION,
                text="{body}",
                metadata=("title",),
            ),
        ),
        pairs=(
            TopicPair(
                prompts=f"{PREFIX}.questions",
                answers=f"{PREFIX}.answers",
                template="{question}",
                retrieval={"collection": COLLECTION},
                max_tokens=_ANSWER_TOKENS,
                temperature=0.0,
                format="json_envelope",
            ),
        ),
    )
    return dataclasses.replace(settings_of(engine, topic_prefix=""), bridge=bridge)


async def _connect(connect: Connect, database: Postgres, stack: Stack) -> None:
    """Connect both tables to their topics, and the answers to the questions."""
    reader = connectors.Database(
        host=database.host, port=database.port, name=DATABASE, user=SOURCE_ROLE
    )
    writer = dataclasses.replace(reader, user=SINK_ROLE)
    log = stack.settings.log
    documents = connectors.source(
        reader, "documents", publication=DOCUMENTS_PUBLICATION, slot="documents",
        partitions=log.document_partitions, prefix=PREFIX,
    )  # fmt: skip
    question_source = connectors.source(
        reader, "questions", publication=QUESTIONS_PUBLICATION, slot="questions",
        partitions=log.prompt_partitions, prefix=PREFIX,
    )  # fmt: skip
    await connect.run("documents", documents)
    await connect.run("questions", connectors.keys_with_schemas(question_source))
    sink = connectors.sink(writer, f"{PREFIX}.answers", table="questions", columns=COLUMNS)
    await connect.run("answers", sink)


async def _load(
    tables: DemoTables, books: Library, pages: Sequence[Page], console: Console
) -> None:
    console.print(f"[bold]4  {PAGES} rows of documents[/bold]", highlight=False)
    texts = [text_of(page) for page in pages]
    await tables.insert(texts)
    with Progress(console=console) as bar:
        task = bar.add_task("found by a search", total=PAGES)
        for text in texts:
            await books.wait_for(COLLECTION, text, _FOUND_S)
            bar.advance(task)


async def _first_answers(
    tables: DemoTables, page: Page, stats: PlatformDemoStats, console: Console
) -> None:
    console.print("[bold]5  three rows of questions[/bold]", highlight=False)
    for question in page.questions:
        row = await tables.answer(question.text, _ANSWERED_S)
        stats.right += question.is_right(row.answer)
        _print(row, console)


async def _edit(
    tables: DemoTables, books: Library, page: Page, stats: PlatformDemoStats, console: Console
) -> None:
    changed = page.edited()
    old, new = page.questions[0].value, changed.questions[0].value
    console.print(
        f"[bold]6  an edit[/bold]: {old} becomes {new} in {page.document_id}", highlight=False
    )
    committed_ms = await tables.edit(text_of(changed))
    await books.wait_for(COLLECTION, text_of(changed), _FOUND_S)
    stats.found_ms.append(wall_ms() - committed_ms)
    row = await tables.answer(changed.questions[0].text, _ANSWERED_S)
    stats.edit_cited_ms = wall_ms() - committed_ms
    stats.edit_cited = changed.text in [citation["text"] for citation in row.citations]
    stats.edit_answered = changed.questions[0].is_right(row.answer)
    _print(row, console)


async def _many_edits(
    tables: DemoTables,
    books: Library,
    pages: Sequence[Page],
    stats: PlatformDemoStats,
    console: Console,
) -> None:
    with Progress(console=console) as bar:
        task = bar.add_task("more edits, found by a search", total=EDITS)
        for number in range(EDITS):
            page = pages[number % len(pages)]
            body = page.text.replace(".", f", as of revision {number}.", 1)
            text = TextDocument(page.document_id, body, page.title)
            committed_ms = await tables.edit(text)
            await books.wait_for(COLLECTION, text, _FOUND_S)
            stats.found_ms.append(wall_ms() - committed_ms)
            bar.advance(task)


async def _delete(
    tables: DemoTables, books: Library, page: Page, stats: PlatformDemoStats, console: Console
) -> None:
    console.print(f"[bold]7  {page.document_id} is deleted[/bold]", highlight=False)
    committed_ms = await tables.delete(page.document_id)
    question = page.questions[0].text
    end_s = time.monotonic() + _FOUND_S
    while page.document_id in await _search_ids(books, question):
        if time.monotonic() > end_s:
            raise EngineFailed(f"{page.document_id}: still found after {_FOUND_S:g} s")
        await asyncio.sleep(_LOOK_S)
    stats.deleted_ms = wall_ms() - committed_ms
    row = await tables.answer(question, _ANSWERED_S)
    stats.delete_gone = page.document_id not in [
        citation["document_id"] for citation in row.citations
    ]
    _print(row, console)


async def _search_ids(books: Library, text: str) -> list[str]:
    deadline_ms = wall_ms() + 10_000
    hits = await books.client.search_text(text, collection=COLLECTION, k=5, deadline_ms=deadline_ms)
    return [passage.document_id for passage in hits.passages]


async def _many_questions(
    tables: DemoTables, pages: Sequence[Page], stats: PlatformDemoStats, console: Console
) -> None:
    console.print(f"[bold]8  {LOAD} questions at once[/bold]", highlight=False)
    began_s = time.monotonic()
    ids = await tables.ask(question.text for question in questions(pages, LOAD))
    end_s = began_s + _ANSWERED_S
    with Progress(console=console) as bar:
        task = bar.add_task("answers in the table", total=LOAD)
        while stats.answers < LOAD and time.monotonic() < end_s:
            stats.answers, stats.errors = await tables.count_answered(ids)
            stats.answers_per_s = stats.answers / (time.monotonic() - began_s)
            bar.update(task, completed=stats.answers)
            await asyncio.sleep(_LOOK_S)


def _print(row: QuestionRow, console: Console) -> None:
    cited = (
        ", ".join(dict.fromkeys(citation["document_id"] for citation in row.citations)) or "nothing"
    )
    console.print(f"  {row.question}", highlight=False, markup=False)
    console.print(escape(f"  {(row.error or row.answer).strip()}"), style="green", highlight=False)
    line = f"  cites {cited}; in the table after {row.waited_ms:.0f} ms"
    console.print(line, style="dim", highlight=False, markup=False)


def _conclude(stats: PlatformDemoStats, console: Console, *, good: bool) -> None:
    mark = "[green]✓[/green]" if good else "[red]✗[/red]"
    yes = {True: "yes", False: "no"}
    console.print(
        f"{mark} {stats.right} of 3 answers right; the edit is cited: {yes[stats.edit_cited]}, and "
        f"in the answer: {yes[stats.edit_answered]}; the deleted row is gone: "
        f"{yes[stats.delete_gone]}; nothing is left running.",
        highlight=False,
    )
    for line in (
        f"commit to searchable: p50 {stats.found_ms_p50:.0f} ms, p99 {stats.found_ms_p99:.0f} ms "
        f"(aim: {_AIM_MS}) over {len(stats.found_ms)} edits; a deleted row was gone after "
        f"{stats.deleted_ms:.0f} ms",
        f"commit to the cited answer in the table: {stats.edit_cited_ms:.0f} ms",
        f"{stats.answers} of {LOAD} answers, {stats.errors} errors: "
        f"{stats.answers_per_s:.1f} answers/s; {stats.took_s:.0f} s in all",
    ):
        console.print(f"  {line}", highlight=False)
