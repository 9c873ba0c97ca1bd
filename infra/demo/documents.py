"""Runs the demo's part with documents: writes documents, and asks for cited answers.

It asks about a page of the handbook with and without the documents, edits the page, and asks again.
Then it kills the router in the middle of an answer that searches during generation. Everything goes
through the gateway and the topic `documents`, as for any user.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
from rich.console import Console
from rich.progress import Progress

from infra.demo.chat_client import DemoTurn, ask
from infra.handbook.handbook import Page, handbook
from infra.handbook.library import Library, TextDocument, library
from infra.stack.launcher import Stack
from infra.terminal.citations import citation_lines
from infra.terminal.output import print_indented

COLLECTION = "handbook"
PAGES = 30
_FOUND_S = 60.0  # for a search to find a document, on a busy machine
_ANSWER_TOKENS = 40
_KILL_AFTER = 3  # events with text
# Before the answer no passage is similar enough; after its first tokens, a probe inserts one.
_WHILE_ANSWERING = {
    "collection": COLLECTION,
    "min_score": 0.999,
    "probes": {"every": 6, "lookahead": 4, "max": 1, "min_score": 0.3, "stall_ms": 2_000},
}


@dataclass(slots=True)
class Tour:
    """The results of the demo's part with documents."""

    turns: list[DemoTurn] = field(default_factory=list)
    right: int = 0
    right_without: int = 0
    edit_cited: bool = False
    edit_answered: bool = False
    found_after_ms: float = 0.0  # from an edit until a search finds it
    goes_on: bool = False  # whether the answer whose router was killed continued
    probed: bool = False  # whether a probe of that answer inserted tokens
    probe_answered: bool = False  # whether that answer is right

    def is_good(self, *, reads: bool) -> bool:
        """Return whether documents had their effect; a simulated model does not read them."""
        answered = self.right > self.right_without and self.edit_answered
        return self.edit_cited and self.goes_on and self.probed and (answered or not reads)


async def tour(stack: Stack, console: Console) -> Tour:
    """Ingest the handbook, ask about a page of it, edit the page, and kill the router."""
    stats = Tour()
    pages = handbook(PAGES)
    page = pages[0]
    async with library(stack.settings.log) as books:
        console.print(f"\n[bold]Documents: a handbook of {PAGES} pages that nobody knows[/bold]")
        with Progress(console=console) as bar:
            task = bar.add_task("found by a search", total=PAGES)
            texts = [text_of(source_page) for source_page in pages]
            await books.put(COLLECTION, texts)
            for text in texts:
                await books.wait_for(COLLECTION, text, _FOUND_S)
                bar.advance(task)
        async with httpx.AsyncClient(base_url=stack.gateway_urls[0], timeout=120) as client:
            await _converse(client, stack, page, stats, console)
            changed = await _edit(books, page, stats, console)
            await _ask_of_the_edit(client, stack, changed, stats, console)
            await _kill_the_router(client, stack, pages[1], stats, console)
    return stats


def text_of(page: Page) -> TextDocument:
    """Return the page as it is written to the log."""
    return TextDocument(page.document_id, page.text, page.title)


async def _converse(
    client: httpx.AsyncClient, stack: Stack, page: Page, stats: Tour, console: Console
) -> None:
    """Run three turns about a page; ask each question without the documents, too."""
    model, messages = stack.settings.model.served_name, list[dict[str, str]]()
    for number, question in enumerate(page.questions, start=1):
        messages.append({"role": "user", "content": question.text})
        plain = await ask(client, model, messages[-1:], _ANSWER_TOKENS, f"plain-{number}")
        turn = await ask(client, f"{model}@{COLLECTION}", messages, _ANSWER_TOKENS, "documents")
        messages.append({"role": "assistant", "content": turn.answer})
        stats.turns.append(turn)
        stats.right += question.is_right(turn.answer)
        stats.right_without += question.is_right(plain.answer)
        console.print(f"[bold]turn {number}[/bold]  {question.text}", highlight=False)
        _print(console, "without documents", plain.answer, "dim")
        _print(console, "with documents   ", turn.answer, "green")
        _print_citations(console, turn)


async def _edit(books: Library, page: Page, stats: Tour, console: Console) -> Page:
    """Change a value on the page, and wait until a search finds it."""
    changed = page.edited()
    old, new = page.questions[0].value, changed.questions[0].value
    began_s = time.monotonic()
    await books.put(COLLECTION, [text_of(changed)])
    await books.wait_for(COLLECTION, text_of(changed), _FOUND_S)
    stats.found_after_ms = (time.monotonic() - began_s) * 1000
    console.print(
        f"[bold]edit[/bold]  {old} becomes {new} in {page.document_id}; found after "
        f"{stats.found_after_ms:.0f} ms",
        highlight=False,
    )
    return changed


async def _ask_of_the_edit(
    client: httpx.AsyncClient, stack: Stack, page: Page, stats: Tour, console: Console
) -> None:
    question = page.questions[0]
    model = f"{stack.settings.model.served_name}@{COLLECTION}"
    messages = [{"role": "user", "content": question.text}]
    turn = await ask(client, model, messages, _ANSWER_TOKENS, "after-the-edit")
    cited = [citation["text"] for citation in turn.citations]
    stats.edit_cited, stats.edit_answered = page.text in cited, question.is_right(turn.answer)
    stats.turns.append(turn)
    _print(console, "with documents   ", turn.answer, "green")
    _print_citations(console, turn)


async def _kill_the_router(
    client: httpx.AsyncClient, stack: Stack, page: Page, stats: Tour, console: Console
) -> None:
    """Kill the router in the middle of an answer that searches only during generation."""
    model, question = stack.settings.model.served_name, page.questions[0]
    router = next(row.pid for row in stack.rows() if row.name == "router-0")

    async def kill(tokens: int) -> None:
        if tokens == _KILL_AFTER:
            await stack.kill("router-0")

    turn = await ask(
        client,
        model,
        [{"role": "user", "content": question.text}],
        _ANSWER_TOKENS,
        "killed-router",
        retrieval=_WHILE_ANSWERING,
        on_token=kill,
    )
    stats.goes_on = turn.is_finished and turn.events > _KILL_AFTER
    stats.probed = any(citation.get("probe") for citation in turn.citations)
    stats.probe_answered = question.is_right(turn.answer)
    stats.turns.append(turn)
    console.print(
        f"[bold]killed[/bold]  router-0 (process {router}) early in an answer that is looked up "
        f"only while it is generated: {question.text}",
        highlight=False,
    )
    _print(console, "the answer goes on", turn.answer, "green")
    _print_citations(console, turn)


def _print(console: Console, title: str, text: str, style: str) -> None:
    print_indented(console, f"{title}  {text.strip()}", style)


def _print_citations(console: Console, turn: DemoTurn) -> None:
    for line in citation_lines(turn.metadata.get("retrieval", {})):
        print_indented(console, line, "dim", cut=True)


def summary(stats: Tour) -> Sequence[str]:
    """Return sentences for the end of the demo."""
    return (
        f"{stats.right} of 3 answers right with documents, {stats.right_without} without",
        f"an edit was found after {stats.found_after_ms:.0f} ms; it changed the next citation: "
        f"{_yes(stats.edit_cited)}, and the next answer: {_yes(stats.edit_answered)}",
        f"an answer whose router was killed went on: {_yes(stats.goes_on)}; it cites what was "
        f"found while it was generated: {_yes(stats.probed)}, and is right: "
        f"{_yes(stats.probe_answered)}",
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"
