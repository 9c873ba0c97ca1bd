"""Implements `trivium dlq`: shows records that failed, and sends them again."""

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.log.explain import duration_ms
from infra.cli.options import AsJson, Bootstrap, Config, settings_of_running
from infra.terminal.output import print_json, stdout_console
from infra.terminal.printable import printable
from schemas.errors import ConfigError, RecordError, TopicError, TriviumError
from schemas.topics import DEAD_LETTER_SUFFIX, TOPICS

if TYPE_CHECKING:
    from infra.stack.configuration import Settings
    from schemas.codec import Codec
    from schemas.settings import LogSettings
    from streams.log.dead_letters import DeadLetter, LetterSelection, Place, RetryCounts

app = typer.Typer(
    help="Show dead letters, and send them again.",
    no_args_is_help=True,
)
Topics = Annotated[
    list[str] | None,
    typer.Option("--topic", help="Their topic; may be repeated.", show_default="all"),
]
Since = Annotated[
    str, typer.Option(metavar="DURATION", help="Only those of the last 30m, 2h or 1d.")
]
Before = Annotated[
    str, typer.Option(metavar="DURATION", help="Only those older than 30m, 2h or 1d.")
]
Error = Annotated[str, typer.Option(help="Only those whose error contains this text.")]
Counts = dict[str, tuple[int, int]]  # partitions of each topic and of its dead-letter topic


@app.command(
    "list",
    epilog="Examples: trivium dlq list --topic prompts --since 1h --error template, "
    "trivium dlq list prompts/0/12",
)
def list_(
    name: Annotated[
        str, typer.Argument(metavar="[TOPIC/PARTITION/OFFSET]", help="Show this dead letter whole.")
    ] = "",
    topic: Topics = None,
    since: Since = "",
    before: Before = "",
    error: Error = "",
    count: Annotated[int, typer.Option("-n", help="Number of the newest to show.")] = 20,
    as_json: AsJson = False,
    config: Config = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Count dead letters by topic, and show the newest.

    Of a dead letter that you name, it shows the error, the headers, and the value as a record, as
    JSON, text or hex.
    """
    settings = settings_of_running(config, bootstrap)
    if name:
        _show_letter(settings, name, as_json=as_json)
        return
    letter_filter = _letter_filter(since, before, error)
    listing = asyncio.run(_list_letters(settings, topic, letter_filter, max(0, count)))
    if as_json:
        newest = [_about(letter) for letter in listing.newest]
        print_json({"waiting": listing.waiting, "retried": listing.retried, "newest": newest})
    else:
        _show_listing(listing)


def _show_letter(settings: "Settings", name: str, *, as_json: bool) -> None:
    letter, codec = asyncio.run(_find_letter(settings, name))
    fields = {**_about(letter), "headers": _texts(letter.headers), **_value(codec, letter.value)}
    if as_json:
        print_json(fields)
        return
    for label in ("name", "at", "retried", "key"):
        print(printable(f"{label}: {fields[label]}"))
    for label, text in [*letter.details.items(), *fields["headers"].items()]:
        print(printable(f"{label}: {text}"))
    value = fields["value"]
    text = value if isinstance(value, str) else json.dumps(value, indent=2, default=_plain)
    print(printable(f"{fields['kind']}:\n{text}", keep="\n"))


@app.command(
    "retry", epilog="Example: trivium dlq retry --topic prompts --error 'worker lost' --dry-run"
)
def retry_(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TOPIC/PARTITION/OFFSET]...", help="Names that `trivium dlq list` shows."
        ),
    ] = None,
    topic: Topics = None,
    since: Since = "",
    before: Before = "",
    error: Error = "",
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    as_json: AsJson = False,
    config: Config = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Send dead letters to their topics again: the same value, key and headers.

    They are marked in the same transaction, so none is sent twice, even if the command is
    interrupted and repeated.
    """
    if not (names or topic or since or before or error or every):
        raise ConfigError(
            "dlq retry: expected letters' names, --topic, --since, --before, --error or --all"
        )
    settings = settings_of_running(config, bootstrap)
    places = [_place(settings.log, name) for name in names or []]
    letter_filter = _letter_filter(since, before, error, places)
    topics = [place[0] for place in letter_filter.places] or topic
    result = asyncio.run(_retry_letters(settings, topics, letter_filter, dry_run))
    if result.sent + result.already + result.impossible < len(letter_filter.places):
        raise ConfigError(f"dlq: expected names that `trivium dlq list` shows, found {names}")
    if as_json:
        print_json({**asdict(result), "dry_run": dry_run})
        return
    would = "would be " * dry_run
    print(f"{result.sent} {would}sent again; {result.already} had been sent before")
    if result.repeatedly:
        print(
            f"{result.repeatedly} of them failed again after they were sent; remove the cause first"
        )
    if result.impossible:
        print(f"{result.impossible} cannot be sent: their values were not stored")


@dataclass(slots=True)
class LetterListing:
    """The dead letters that `trivium dlq list` shows: counts and the newest ones."""

    waiting: Counter[str] = field(default_factory=Counter)
    retried: Counter[str] = field(default_factory=Counter)
    newest: "list[DeadLetter]" = field(default_factory=list)


async def _list_letters(
    settings: "Settings", topics: list[str] | None, letter_filter: "LetterSelection", count: int
) -> LetterListing:
    from streams.log.dead_letters import read_letters

    listing = LetterListing()
    for topic, (_, partitions) in (await _counts(settings, topics)).items():
        newest = deque["DeadLetter"](maxlen=count)
        async for letter in read_letters(settings.log, topic, partitions):
            if letter in letter_filter:
                (listing.retried if letter.is_retried else listing.waiting)[letter.topic] += 1
                newest.append(letter)
        listing.newest += newest
    listing.newest.sort(key=lambda letter: letter.at_ms)
    del listing.newest[: -count or None]
    return listing


async def _find_letter(settings: "Settings", name: str) -> "tuple[DeadLetter, Codec]":
    from streams.log.dead_letters import read_letters
    from streams.log.registry import make_codec

    place = topic, *_ = _place(settings.log, name)
    _, partitions = (await _counts(settings, [topic])).get(topic, (0, 0))
    async with aclosing(read_letters(settings.log, topic, partitions)) as letters:
        async for letter in letters:
            if letter.place == place:
                return letter, await asyncio.to_thread(make_codec, settings.log)
    raise ConfigError(f"dlq: expected a name that `trivium dlq list` shows, found {name!r}")


async def _retry_letters(
    settings: "Settings", topics: list[str] | None, letter_filter: "LetterSelection", dry_run: bool
) -> "RetryCounts":
    from streams.log.dead_letters import RetryCounts, count_retries, retry

    result, send = RetryCounts(), count_retries if dry_run else retry
    try:
        for topic, partitions in (await _counts(settings, topics)).items():
            await send(settings.log, topic, partitions, letter_filter, result)
    except TriviumError as error:
        raise type(error)(f"{result.sent} were sent again, then: {error.message}") from error
    return result


async def _counts(settings: "Settings", topics: list[str] | None) -> Counts:
    """Return partition counts of the topics that have dead letters: all, or the named ones."""
    from streams.bridge.config import pairs_of
    from streams.log.admin import partition_counts
    from streams.log.dead_letters import topics_with_letters

    log = settings.log
    names = [_full(log, topic) for topic in topics or []] or [
        *(log.topic_prefix + name for name in TOPICS),
        *(pair.prompts for pair in pairs_of(settings.bridge, log.topic_prefix)),
    ]
    names = list(dict.fromkeys(names))
    counts = await partition_counts(log, [*names, *(name + DEAD_LETTER_SUFFIX for name in names)])
    missing = [name for name in names if name + DEAD_LETTER_SUFFIX not in counts]
    if topics and missing:
        raise TopicError(f"--topic: no dead letters of {', '.join(missing)} on {log.bootstrap}")
    of_letters = {name: counts[name + DEAD_LETTER_SUFFIX] for name in names if name not in missing}
    present = await topics_with_letters(log, of_letters)
    return {name: (counts.get(name, 0), of_letters[name]) for name in of_letters if name in present}


def _full(log: "LogSettings", topic: str) -> str:
    """Return the full name of a topic, which may be given without the prefix or with its .dlq."""
    name = topic.removesuffix(DEAD_LETTER_SUFFIX)
    return log.topic_prefix + name if name in TOPICS else name


def _place(log: "LogSettings", name: str) -> "Place":
    topic, partition, offset = (*name.rsplit("/", 2), "", "")[:3]
    if not (topic and partition.isdigit() and offset.isdigit()):
        raise ConfigError(f"dlq: expected TOPIC/PARTITION/OFFSET, found {name!r}")
    return _full(log, topic), int(partition), int(offset)


def _letter_filter(
    since: str, before: str, error: str, places: "Iterable[Place]" = ()
) -> "LetterSelection":
    from streams.log.dead_letters import LetterSelection

    now_ms = int(time.time() * 1000)
    return LetterSelection(
        places=frozenset(places),
        since_ms=now_ms - duration_ms(since) if since else 0,
        before_ms=now_ms - duration_ms(before, "--before") if before else 1 << 62,
        error=error,
    )


def _show_listing(listing: LetterListing) -> None:
    from rich.markup import escape
    from rich.table import Table

    topics = sorted({*listing.waiting, *listing.retried})
    if not topics:
        print("no dead letters")
        return
    counts = Table("topic", "waiting", "sent again", box=None)
    for topic in topics:
        counts.add_row(topic, str(listing.waiting[topic]), str(listing.retried[topic]))
    letters = Table("name", "at", "key", "was at", "attempts", "error", box=None)
    for letter in listing.newest:
        key = (letter.key or b"").decode(errors="replace")
        error = letter.error + " (sent again)" * letter.is_retried
        attempts = letter.details.get("attempts", "-")
        row = (letter.name, _time(letter.at_ms), key[:40], letter.origin, attempts, error[:200])
        letters.add_row(*(escape(printable(cell)) for cell in row))
    for table in (counts, letters):
        stdout_console().print(table)


def _about(letter: "DeadLetter") -> dict[str, Any]:
    return {
        "name": letter.name,
        "topic": letter.topic,
        "at_ms": letter.at_ms,
        "at": _time(letter.at_ms),
        "key": None if letter.key is None else letter.key.decode(errors="replace"),
        "retried": letter.is_retried,
        "dead_letter": letter.details,
    }


def _value(codec: "Codec", value: bytes | None) -> dict[str, Any]:
    """Return the value with its kind: a record of ours, JSON, text, or bytes in hexadecimal."""
    from schemas.codec import to_dict

    if value is None:
        return {"kind": "nothing", "value": None}
    try:
        record = codec.decode(value)
        return {"kind": type(record).__name__, "value": to_dict(record)}
    except RecordError:
        pass
    try:
        return {"kind": "json", "value": json.loads(value)}
    except (ValueError, RecursionError):
        pass
    try:
        return {"kind": "text", "value": value.decode()}
    except ValueError:
        return {"kind": "hex", "value": value.hex()}


def _texts(headers: tuple[tuple[str, bytes], ...]) -> dict[str, str]:
    return {name: value.decode(errors="replace") for name, value in headers}


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _plain(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
