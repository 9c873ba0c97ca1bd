"""Runs `trivium demo`: conversations over Kafka with real engines and NIXL, with cited documents.

It starts its own stack (1 prefill, 1 decode, 1 retrieval, 1 embedding worker) in its own state
folder, and sends requests as any OpenAI client would. It reads the path of one request from the
log, and compares every answer with one engine alone.
"""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Sequence

import httpx
from rich.console import Console
from rich.markup import escape

from infra.demo.chat_client import DemoTurn, ask
from infra.demo.documents import Tour, summary, tour
from infra.demo.reference_engine import AnswerVerdict, ReferenceEngine
from infra.stack import configuration
from infra.stack.configuration import Settings
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from infra.story.record_finder import read_stories
from infra.story.screen import show
from infra.story.steps import steps_of
from infra.story.story import Story
from infra.terminal.output import print_indented, stdout_console
from infra.terminal.stack_display import LiveTable, PlainLines
from schemas.records import OutcomeKind
from schemas.state_folder import home

CONVERSATIONS = (
    (
        "What is the capital of France?",
        "And of Italy?",
        "And of Japan?",
    ),
    (
        "What is photosynthesis, in one sentence?",
        "Where does it happen?",
        "What does it produce?",
    ),
    (
        "What is water made of, in one sentence?",
        "At what temperature does it freeze?",
        "And when does it boil?",
    ),
)
ANSWER_TOKENS = 64
# The processes that a chat needs: without a prefill worker, the decode worker computes prompts.
_FIRST = ("router-0", "gateway-0", "decode-0")


def run(*, engine: str = "vllm", as_json: bool = False) -> int:
    """Run the demo; return 0 if every answer equals that of one engine alone."""
    console = Console(stderr=True) if as_json else stdout_console()
    return asyncio.run(_demo(engine, console, as_json=as_json))


async def _demo(engine: str, console: Console, *, as_json: bool) -> int:
    settings = settings_of(engine, f"demo-{int(time.time())}.")  # no earlier run's topics
    folder = home() / "demo"
    plan = StackPlan(prefill=1, decode=1, retrieval=1, embedding=1)
    stack = Stack(settings, plan, folder=folder)
    with contextlib.ExitStack() as ending:
        try:
            await start(stack, console)
            await _converse(stack, console)
            reference = ReferenceEngine(stack)
            ending.callback(reference.stop)
            await asyncio.to_thread(reference.ask, await _stories(stack))
            await stack.wait_ready()
            stats = await tour(stack, console)
            stories = await _stories(stack)
            with console.status("asking one engine alone the same questions"):
                verdicts = await asyncio.to_thread(reference.compare, stories)
        finally:
            with console.status("stopping: drain, then leave"):
                await stack.stop(grace_s=20)
    console.print("\nThe way of one request, read back from the log:", style="bold")
    explained = next(s for s in stories if s.request.request_id == stats.turns[0].request_id)
    show(explained, console)
    return _conclude(
        stories, explained, verdicts, stats, console, reads=engine == "vllm", as_json=as_json
    )


async def _stories(stack: Stack) -> list[Story]:
    return list((await read_stories(stack.settings.log)).values())


def settings_of(engine: str, topic_prefix: str) -> Settings:
    """Return defaults on free ports, with the engine's default model."""
    settings = configuration.load()
    replace = dataclasses.replace
    return replace(
        settings,
        log=replace(settings.log, topic_prefix=topic_prefix),
        broker=replace(settings.broker, port=0),
        gateway=replace(settings.gateway, port=0),
        worker=replace(settings.worker, engine=engine),
        model=replace(settings.model, path="", name="", adapters={}),
        other_models=(),
        model_workers=(),
    )


async def start(stack: Stack, console: Console) -> None:
    """Start a stack, and show its progress."""
    lines = LiveTable if console.is_terminal else PlainLines
    with lines(stack, console) as display:
        showing = asyncio.create_task(display.follow())
        try:
            await stack.begin()
            await stack.wait_ready(*_FIRST)
        finally:
            showing.cancel()
            display.show()


async def _converse(stack: Stack, console: Console) -> None:
    """Run all conversations at once, turn by turn, after the first answer."""
    model = stack.settings.model.served_name
    async with httpx.AsyncClient(base_url=stack.gateway_urls[0], timeout=120) as client:
        history = await _first_answer(client, model, stack, console)
        await stack.wait_ready(*stack.plan.engine_names())
        talks = [
            _conversation(client, model, questions, number, console, history if number == 1 else ())
            for number, questions in enumerate(CONVERSATIONS, start=1)
        ]
        await asyncio.gather(*talks)


async def _first_answer(
    client: httpx.AsyncClient, model: str, stack: Stack, console: Console
) -> Sequence[dict[str, str]]:
    """Print the first answer while it is generated; return its messages."""
    question = {"role": "user", "content": CONVERSATIONS[0][0]}
    _print_question(console, "conversation 1, turn 1", question["content"])
    console.print("  ", end="")

    async def show(text: str) -> None:
        console.print(escape(text), style="green", highlight=False, end="", soft_wrap=True)

    turn = await ask(client, model, [question], ANSWER_TOKENS, "demo-1", on_text=show)
    console.print(f"\n  the first answer, {stack.age_s:.0f} s after the start", style="dim")
    _print_placement(console, turn)
    return question, {"role": "assistant", "content": turn.answer}


async def _conversation(
    client: httpx.AsyncClient,
    model: str,
    questions: Sequence[str],
    number: int,
    console: Console,
    history: Sequence[dict[str, str]],
) -> None:
    messages = [*history]
    for place, question in [*enumerate(questions, start=1)][len(history) // 2 :]:
        messages.append({"role": "user", "content": question})
        turn = await ask(client, model, messages, ANSWER_TOKENS, f"demo-{number}")
        messages.append({"role": "assistant", "content": turn.answer})
        _print_question(console, f"conversation {number}, turn {place}", question)
        print_indented(console, turn.answer or turn.reasoning, "green")
        _print_placement(console, turn)


def _print_question(console: Console, title: str, question: str) -> None:
    console.print(f"[bold]{title}[/bold]  {question}", highlight=False)


def _print_placement(console: Console, turn: DemoTurn) -> None:
    metadata, usage = turn.metadata, turn.usage
    workers = dict.fromkeys((metadata.get("prefill_worker"), metadata.get("decode_worker")))
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    print_indented(
        console,
        f"{metadata.get('mode')} on {' and '.join(filter(None, workers))}; "
        f"first token after {turn.first_token_ms:.0f} ms; {usage.get('prompt_tokens')} prompt "
        f"tokens, {cached} cached; {metadata.get('kv_bytes', 0):,} KV bytes over NIXL",
        "dim",
    )


def _conclude(
    stories: Sequence[Story],
    explained: Story,
    verdicts: Sequence[AnswerVerdict],
    stats: Tour,
    console: Console,
    *,
    reads: bool,
    as_json: bool,
) -> int:
    equal = sum(verdict.equal for verdict in verdicts)
    kv_bytes = sum(story.kv_bytes for story in stories)
    completed = sum(
        story.outcome is not None and story.outcome.kind is OutcomeKind.COMPLETED
        for story in stories
    )
    good = equal == len(stories) == completed and kv_bytes > 0 and stats.is_good(reads=reads)
    mark = "[green]✓[/green]" if good else "[red]✗[/red]"
    console.print(
        f"{mark} {completed} of {len(stories)} answers completed; {equal} equal one engine alone, "
        f"token by token; {kv_bytes:,} KV bytes went over NIXL; nothing is left running.",
        highlight=False,
    )
    for sentence in summary(stats):
        console.print(f"  {sentence}", highlight=False)
    for verdict in verdicts:
        if not verdict.equal:
            console.print(f"  {verdict.request_id} differs from token {verdict.first_difference}")
    if as_json:
        report = {
            "good": good,
            "kv_bytes": kv_bytes,
            "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts],
            "documents": dataclasses.asdict(stats),
            "steps": [dataclasses.asdict(step) for step in steps_of(explained)],
        }
        Console().print_json(json.dumps(report))
    return 0 if good else 1
