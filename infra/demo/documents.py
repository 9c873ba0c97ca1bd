"""The part of the demo in which answers are looked up: documents in, cited answers out.

A page of the handbook is asked about with and without the documents, edited, and asked about again;
then the router is killed in the middle of an answer that was looked up. Everything goes through the
gateway and the topic `documents`, as for any user.
"""

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from infra.demo.asking import Turn, ask
from infra.handbook.handbook import Page, handbook
from infra.stack.launcher import Stack
from infra.terminal.citations import citation_lines
from schemas.errors import EngineFailed, TriviumError
from schemas.log.clients import LogProducer
from schemas.log.clock import wall_ms
from schemas.log.registry import make_codec
from schemas.log.retrieval.asker import Asker
from schemas.log.retrieval.member import asking
from schemas.records import Document
from schemas.topics import document_key, partition_of

COLLECTION = "handbook"
PAGES = 30
_FOUND_S = 60.0  # for a document to be found, on a machine with much else to do
_LOOK_S = 0.1
_ANSWER_TOKENS, _LONG_TOKENS = 40, 96
_KILL_AFTER = 4  # events with text


@dataclass(slots=True)
class Tour:
    """What was asked of documents, and what came of it."""

    turns: list[Turn] = field(default_factory=list)
    right: int = 0
    right_without: int = 0
    edit_cited: bool = False
    edit_answered: bool = False
    found_after_ms: float = 0.0  # an edited document, by a search
    goes_on: bool = False  # the answer whose router was killed

    def is_good(self, *, reads: bool) -> bool:
        """Whether documents did what they are for; a simulated model does not read them."""
        answered = self.right > self.right_without and self.edit_answered
        return self.edit_cited and self.goes_on and (answered or not reads)


async def tour(stack: Stack, console: Console) -> Tour:
    """Ingest the handbook, ask about a page of it, edit the page, and kill the router."""
    seen = Tour()
    pages = handbook(PAGES)
    page = pages[0]
    async with _pool(stack) as (asker, producer):
        console.print(f"\n[bold]Documents: a handbook of {PAGES} pages that nobody knows[/bold]")
        with Progress(console=console) as bar:
            task = bar.add_task("found by a search", total=PAGES)
            for each in pages:
                await _write(stack, producer, each)
            for each in pages:
                await _until_found(asker, each)
                bar.advance(task)
        async with httpx.AsyncClient(base_url=stack.gateway_urls[0], timeout=120) as client:
            await _converse(client, stack, page, seen, console)
            edited = await _edit(stack, producer, asker, page, seen, console)
            await _ask_of_the_edit(client, stack, edited, seen, console)
            await _kill_the_router(client, stack, edited, seen, console)
    return seen


@asynccontextmanager
async def _pool(stack: Stack) -> AsyncIterator[tuple[Asker, LogProducer]]:
    log = stack.settings.log
    codec = await asyncio.to_thread(make_codec, log)
    producer = LogProducer(log, codec, durable=True, client_id="demo-documents")
    await producer.start()
    try:
        async with asking(log, codec, "demo-asks") as asker:
            yield asker, producer
    finally:
        await producer.stop()


async def _write(stack: Stack, producer: LogProducer, page: Page) -> None:
    """As a connector would: the text and what it is called, under its key."""
    document = Document(
        document_id=page.document_id,
        collection=COLLECTION,
        text=page.text,
        metadata=json.dumps({"title": page.title, "source": f"{page.document_id}.md"}),
        at_ms=wall_ms(),
    )
    key = document_key(COLLECTION, page.document_id)
    partition = partition_of(key, stack.settings.log.document_partitions)
    await (await producer.send("documents", document, key=key, partition=partition))


async def _until_found(asker: Asker, page: Page) -> None:
    """Until a search brings the page as it is now."""
    end_ms = wall_ms() + round(1000 * _FOUND_S)
    while wall_ms() < end_ms:
        try:
            found = await asker.search_text(
                page.text, collection=COLLECTION, k=1, deadline_ms=wall_ms() + 10_000
            )
        except TriviumError:  # no such collection yet
            found = None
        if found is not None and any(passage.text == page.text for passage in found.passages):
            return
        await asyncio.sleep(_LOOK_S)
    raise EngineFailed(f"{page.document_id}: not found by a search within {_FOUND_S:.0f} s")


async def _converse(
    client: httpx.AsyncClient, stack: Stack, page: Page, seen: Tour, console: Console
) -> None:
    """Three turns about a page; each question is asked without the documents, too."""
    model, messages = stack.settings.model.served_name, list[dict[str, str]]()
    for number, question in enumerate(page.questions, start=1):
        messages.append({"role": "user", "content": question.text})
        plain = await ask(client, model, messages[-1:], _ANSWER_TOKENS, f"plain-{number}")
        turn = await ask(client, f"{model}@{COLLECTION}", messages, _ANSWER_TOKENS, "documents")
        messages.append({"role": "assistant", "content": turn.answer})
        seen.turns.append(turn)
        seen.right += question.is_right(turn.answer)
        seen.right_without += question.is_right(plain.answer)
        console.print(f"[bold]turn {number}[/bold]  {question.text}", highlight=False)
        _print(console, "without documents", plain.answer, "dim")
        _print(console, "with documents   ", turn.answer, "green")
        _print_citations(console, turn)


async def _edit(
    stack: Stack, producer: LogProducer, asker: Asker, page: Page, seen: Tour, console: Console
) -> Page:
    """Change a value on the page, as an author would."""
    old = page.questions[0]
    new = str(int(old.value) + 1) if old.value.isdigit() else old.others[0]
    question = dataclasses.replace(old, value=new)
    text = page.text.replace(old.value, new, 1)
    edited = dataclasses.replace(page, text=text, questions=(question, *page.questions[1:]))
    began_s = time.monotonic()
    await _write(stack, producer, edited)
    await _until_found(asker, edited)
    seen.found_after_ms = (time.monotonic() - began_s) * 1000
    console.print(
        f"[bold]edit[/bold]  {old.value} becomes {new} in {page.document_id}; found after "
        f"{seen.found_after_ms:.0f} ms",
        highlight=False,
    )
    return edited


async def _ask_of_the_edit(
    client: httpx.AsyncClient, stack: Stack, page: Page, seen: Tour, console: Console
) -> None:
    question = page.questions[0]
    model = f"{stack.settings.model.served_name}@{COLLECTION}"
    messages = [{"role": "user", "content": question.text}]
    turn = await ask(client, model, messages, _ANSWER_TOKENS, "after-the-edit")
    cited = [each["text"] for each in turn.citations]
    seen.edit_cited, seen.edit_answered = page.text in cited, question.is_right(turn.answer)
    seen.turns.append(turn)
    _print(console, "with documents   ", turn.answer, "green")
    _print_citations(console, turn)


async def _kill_the_router(
    client: httpx.AsyncClient, stack: Stack, page: Page, seen: Tour, console: Console
) -> None:
    """In the middle of an answer that was looked up."""
    model = f"{stack.settings.model.served_name}@{COLLECTION}"
    text = f"Tell me all that you know about {page.title}."
    router = next(row.pid for row in stack.rows() if row.name == "router-0")

    async def kill(tokens: int) -> None:
        if tokens == _KILL_AFTER:
            await stack.kill("router-0")

    messages = [{"role": "user", "content": text}]
    turn = await ask(
        client, model, messages, _LONG_TOKENS, "killed-router", min_tokens=32, on_token=kill
    )
    seen.goes_on = turn.ended and turn.events > _KILL_AFTER
    seen.turns.append(turn)
    console.print(
        f"[bold]killed[/bold]  router-0 (process {router}) early in this answer: {text}",
        highlight=False,
    )
    _print(console, "the answer goes on", turn.answer, "green")
    _print_citations(console, turn)


def _print(console: Console, title: str, text: str, style: str) -> None:
    console.print(f"  {title}  {escape(text.strip())}", style=style, highlight=False)


def _print_citations(console: Console, turn: Turn) -> None:
    for line in citation_lines(turn.told.get("retrieval", {})):
        console.print(f"  {line}", style="dim", highlight=False, markup=False, soft_wrap=True)


def summary(seen: Tour) -> Sequence[str]:
    """Sentences for the end of the demo."""
    return (
        f"{seen.right} of 3 answers right with documents, {seen.right_without} without",
        f"an edit was found after {seen.found_after_ms:.0f} ms; it changed the next citation: "
        f"{_yes(seen.edit_cited)}, and the next answer: {_yes(seen.edit_answered)}",
        f"an answer whose router was killed went on: {_yes(seen.goes_on)}",
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"
