"""Implements `trivium tail TOPIC`: prints the decoded records of a topic as they come."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import AsJson, Bootstrap, Config, settings_of_running
from infra.terminal.printable import printable
from schemas.errors import ConfigError, RecordError
from schemas.topics import DEAD_LETTER_HEADERS, DEAD_LETTER_SUFFIX, TOPICS

if TYPE_CHECKING:
    from schemas.settings import LogSettings

_LONG_LIST = 12


def tail(
    topic: Annotated[str, typer.Argument(help="A topic of `trivium topics`, or its NAME.dlq.")],
    from_beginning: Annotated[
        bool, typer.Option("--from-beginning", help="Start with the oldest record.")
    ] = False,
    count: Annotated[
        int, typer.Option("-n", help="Stop after so many records.", show_default="never")
    ] = 0,
    as_json: AsJson = False,
    config: Config = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Print decoded records of a topic.

    Examples: `trivium tail decisions`, `trivium tail requests --from-beginning -n 3 --json`
    """
    table = topic.removesuffix(DEAD_LETTER_SUFFIX)
    if table not in TOPICS:
        raise ConfigError(f"topic: expected one of {', '.join(TOPICS)}, found {topic!r}")
    log = settings_of_running(config, bootstrap).log
    partitions = 1 if topic != table else log.partitions(TOPICS[table].group)
    asyncio.run(_follow(log, topic, partitions, from_beginning, count, as_json))


async def _follow(
    log: "LogSettings", topic: str, partitions: int, from_beginning: bool, count: int, as_json: bool
) -> None:
    from streams.log.clients import AssignedReader
    from streams.log.registry import make_codec

    codec = await asyncio.to_thread(make_codec, log)
    reader = AssignedReader(
        log, topic, range(partitions), client_id="trivium-tail", committed_only=True
    )
    async with reader.reading("earliest" if from_beginning else "latest"):
        if not from_beginning and sys.stderr.isatty():
            hint = f"{topic} from now on; --from-beginning shows what is there, Ctrl-C ends"
            print(hint, file=sys.stderr)
        line_count = 0
        while True:
            for record in sorted(await reader.batch(), key=lambda row: row.timestamp):
                print(_line(codec, record, as_json))
                line_count += 1
                if line_count == count:
                    return
            sys.stdout.flush()


def _line(codec: Any, record: Any, as_json: bool) -> str:
    from schemas.codec import to_dict
    from schemas.rules.tokens import unpack_tokens

    place = {"partition": record.partition, "offset": record.offset, "at_ms": record.timestamp}
    key = record.key.decode(errors="replace") if record.key else ""
    headers = {name: value.decode(errors="replace") for name, value in record.headers}
    buried = {
        name.removeprefix(DEAD_LETTER_HEADERS): value
        for name, value in headers.items()
        if name.startswith(DEAD_LETTER_HEADERS)
    }
    try:
        decoded = codec.decode(record.value)
        kind, fields = type(decoded).__name__, to_dict(decoded)
        if isinstance(packed := fields.get("prompt_tokens"), bytes):
            fields = {**fields, "prompt_tokens": unpack_tokens(packed)}
    except RecordError as error:
        kind, fields = "undecodable", {"error": error.message, **headers}
        if not record.value and not buried:  # a tombstone deletes its key
            kind, fields = "Tombstone", {}
    if as_json:
        origin = {"buried": buried} if buried else {}
        line = {"record": kind, "key": key, **place, "value": fields, **origin}
        return json.dumps(line, default=_plain)
    if buried and kind != "undecodable":
        place_before = f"{buried['topic']} {buried['partition']}/{buried['offset']}"
        why = buried["error-message"]
        text = f"buried from {place_before}, {why}; {_fields(fields)}"
    elif kind == "Decision":
        text = _decision(fields)
    elif kind == "KvEvents":
        text = _fields({**fields, **_block_counts(fields)})
    else:
        text = _fields(fields)
    return printable(f"{record.partition}/{record.offset} {kind} {key}: {text}")


def _fields(fields: dict[str, Any]) -> str:
    return " ".join(f"{name}={_short(value)}" for name, value in _telling(fields))


def _decision(fields: dict[str, Any]) -> str:
    """Return what was decided and why, in a line; `trivium explain` and --json show more."""
    workers = " → ".join(filter(None, (fields["prefill_worker"], fields["decode_worker"])))
    words = [fields["request_id"], fields["kind"]]
    words += [value for value in (fields["mode"], fields["orchestration"]) if value != "none"]
    words += [f"on {workers}"] if workers else []
    words.append(f"because {fields['reason']} (policy {fields['policy'] or 'none'})")
    words += [f"attempt {fields['attempt']}"] if fields["attempt"] > 1 else []
    words += [f"waited {fields['waited_ms']} ms"] if fields["waited_ms"] else []
    if (estimate := fields["estimate"]) is not None:
        if estimate["ttft_remote_ms"]:
            words.append(
                f"TTFT {estimate['ttft_local_ms']:.0f} ms local, {estimate['ttft_remote_ms']:.0f} "
                f"remote; TPOT {estimate['tpot_local_ms']:.1f} local, "
                f"{estimate['tpot_remote_ms']:.1f} remote;"
            )
        words.append(f"score {estimate['score']:+.3f} from {estimate['samples']}")
    return " ".join(words)


def _block_counts(fields: dict[str, Any]) -> dict[str, str]:
    """Return block hashes as counts; each hash has 8 bytes."""
    counts = {name: len(fields[name]) // 8 for name in ("stored", "removed")}
    return {name: f"{count} blocks" if count else "" for name, count in counts.items()}


def _telling(fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields that are not empty."""
    for name, value in fields.items():
        if value not in (None, "", 0, [], (), {}, b"", "none"):
            yield name, value


def _short(value: Any) -> str:
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, dict):
        inner = ", ".join(f"{name}={_short(item)}" for name, item in _telling(value))
        return "{" + inner + "}"
    if isinstance(value, list | tuple):
        items = [_short(item) for item in value[:_LONG_LIST]]
        rest = [f"and {len(value) - _LONG_LIST} more"] if len(value) > _LONG_LIST else []
        return "[" + ", ".join(items + rest) + "]"
    return str(value)


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"no JSON form for {type(value).__name__}")
