"""Whether each prompt has exactly one answer: `python infra/bench/platform/checker.py TASK.json`.

Reads the raw topics as committed and the notes that clients wrote while they sent, and prints its
findings as JSON. Imports nothing of what it judges; Avro schemas are read as files. TASK.json says
`bootstrap`, `prefix`, `schemas` (the folder of .avsc files), `group`, `pairs` (each with `prompts`,
`answers`, `notes`, `ordered`), `http` (notes of HTTP clients) and `batches` (each with `input`,
`output`, `errors`).
"""

import asyncio
import io
import json
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import aiokafka
import fastavro
from aiokafka.admin import AIOKafkaAdminClient
from fastavro.schema import fingerprint, load_schema, to_parsing_canonical_form
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # ships no types

SINGLE_OBJECT = b"\xc3\x01"
COORDINATES = tuple(f"trivium-prompt-{name}" for name in ("topic", "partition", "offset"))
READ_S = 600.0
NAMED_MAX = 5
Tokens = tuple[int, int]


class Record(NamedTuple):
    """One record, its value decoded; None deletes."""

    partition: int
    offset: int
    key: bytes | None
    value: Any
    headers: Mapping[str, bytes]


class Decoder:
    """Values as JSON or as Avro in single-object framing."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self._schemas = {}
        for name in names:
            schema = load_schema(folder / f"trivium.{name}.avsc")
            mark = fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO")
            self._schemas[bytes.fromhex(mark)] = schema

    def decode(self, value: bytes | None) -> Any:
        """What it says."""
        if value is None:
            return None
        if value[:2] != SINGLE_OBJECT:
            return json.loads(value)
        schema = self._schemas[value[2:10]]
        return fastavro.schemaless_reader(io.BytesIO(value[10:]), schema, schema)


@asynccontextmanager
async def _asking(bootstrap: str) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


async def read(bootstrap: str, topic: str, decoder: Decoder | None) -> list[Record]:
    """All committed records of a topic, raw without a decoder; none where there is no topic."""
    async with _asking(bootstrap) as admin:
        (told,) = await admin.describe_topics([topic])
    consumer = aiokafka.AIOKafkaConsumer(
        bootstrap_servers=bootstrap, isolation_level="read_committed", enable_auto_commit=False,
        auto_offset_reset="earliest", fetch_max_bytes=1 << 24, max_partition_fetch_bytes=1 << 23,
    )  # fmt: skip
    records: list[Record] = []
    async with consumer, asyncio.timeout(READ_S):
        places = [aiokafka.TopicPartition(topic, each["partition"]) for each in told["partitions"]]
        consumer.assign(places)
        ends = await consumer.end_offsets(places)
        while any([await consumer.position(place) < ends[place] for place in places]):
            for got in (await consumer.getmany(timeout_ms=500)).values():
                for each in got:
                    value = decoder.decode(each.value) if decoder else each.value
                    headers, at = dict(each.headers), (each.partition, each.offset)
                    records.append(Record(*at, each.key, value, headers))
    return records


async def positions(bootstrap: str, group: str, topic: str) -> dict[int, int]:
    """What lag tools would read."""
    async with _asking(bootstrap) as admin:
        found = await admin.list_consumer_group_offsets(group)
    return {at.partition: told.offset for at, told in found.items() if at.topic == topic}


def check_pair(
    topic: str,
    prompts: Sequence[Record],
    answers: Sequence[Record],
    dead: Sequence[Record],
    notes: Iterable[Mapping[str, Any]],
    *,
    ordered: bool,
) -> dict[str, Any]:
    """Answers, missing, double, order: of one topic of prompts and its topic of answers."""
    by_place = {(each.partition, each.offset): each for each in prompts}
    answered: Counter[tuple[int, int]] = Counter()
    foreign, misplaced, out_of_order = [], [], []
    latest: dict[tuple[int, bytes | None], int] = {}
    for each in answers:
        place = place_of(each)
        prompt = by_place.get(place) if place else None
        if place is None or prompt is None or each.headers[COORDINATES[0]].decode() != topic:
            foreign.append((each.partition, each.offset))
            continue
        answered[place] += 1
        if (prompt.key, prompt.partition) != (each.key, each.partition):
            misplaced.append(place)
        line = (prompt.partition, prompt.key)
        if place[1] < latest.get(line, -1):
            out_of_order.append(place)
        latest[line] = max(place[1], latest.get(line, -1))
    noted = {(note["p"], note["o"]) for note in notes}
    codes = (each.value.get("error_code") for each in answers if each.value)
    errors = Counter(code for code in codes if code)
    return {
        "prompts": len(prompts),
        "sent": len(noted),
        "sent_but_not_there": _named(noted - by_place.keys()),
        "answers": len(answers),
        "missing": _named(by_place.keys() - answered.keys()),
        "double": _named(place for place, count in answered.items() if count > 1),
        "of_no_prompt": _named(foreign),
        "under_another_key": _named(misplaced),
        "out_of_order": _named(out_of_order) if ordered else None,
        "errors": dict(errors),
        "dead_letters": len(dead),
        "errors_without_dead_letter": max(0, errors.total() - len(dead)),
        "forms": check_forms(by_place, answers),
    }


def place_of(answer: Record) -> tuple[int, int] | None:
    """Whose answer it says it is; headers and fields must agree."""
    try:
        place = int(answer.headers[COORDINATES[1]]), int(answer.headers[COORDINATES[2]])
    except (KeyError, ValueError):
        return None
    value = answer.value
    if value is not None and (value["prompt_partition"], value["prompt_offset"]) != place:
        return None
    return place


def check_forms(
    prompts: Mapping[tuple[int, int], Record], answers: Sequence[Record]
) -> dict[str, Any]:
    """How many answers to prompts with a JSON schema keep to it; an error keeps to nothing."""
    wanted, invalid, validators = 0, [], dict[str, Any]()
    for each in answers:
        place = place_of(each)
        prompt = prompts.get(place) if place else None
        schema = schema_of(prompt.value) if prompt else None
        if schema is None:
            continue
        wanted += 1
        validator = validators.setdefault(json.dumps(schema), Draft202012Validator(schema))
        if not is_valid(validator, (each.value or {}).get("text")):
            invalid.append(place)
    return {"wanted": wanted, "invalid": _named(invalid)}


def schema_of(prompt: Any) -> Any:
    """Of a prompt, or of the call that a line of a batch holds."""
    if not isinstance(prompt, dict):
        return None
    form = prompt.get("response_format")
    if form is None and prompt.get("body"):
        form = _parsed(prompt["body"]).get("response_format")
    form = _parsed(form)
    return form["json_schema"]["schema"] if form and form["type"] == "json_schema" else None


def _parsed(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def is_valid(validator: Any, text: Any) -> bool:
    """Whether a text is a JSON value that a validator takes."""
    with suppress(TypeError, ValueError):  # no text, or no JSON
        return bool(validator.is_valid(json.loads(text)))
    return False


def check_usage(
    usage: Sequence[Record], requests: Iterable[str], counted: Mapping[str, Tokens]
) -> dict[str, Any]:
    """One record for each request, numbered without gaps, with what its client counted."""
    seen = Counter(each.value["request_id"] for each in usage)
    used = {each.value["request_id"]: tokens_of(each.value) for each in usage}
    numbers: dict[int, list[int]] = defaultdict(list)
    for each in usage:
        numbers[each.partition].append(each.value["number"])
    accepted = set(requests)
    pairs = {each: (told, used.get(each, (0, 0))) for each, told in counted.items()}
    return {
        "records": len(usage),
        "requests": len(accepted),
        "requests_without_record": _named(accepted - seen.keys()),
        "records_without_request": _named(seen.keys() - accepted),
        "double": _named(request_id for request_id, count in seen.items() if count > 1),
        "gaps": sum(has != list(range(len(has))) for has in numbers.values()),
        "counted_by_clients": len(counted),
        "tokens_counted_by_clients": sum(map(sum, counted.values())),
        "difference_tokens": sum(
            abs(a - b) for told, has in pairs.values() for a, b in zip(told, has, strict=True)
        ),
        "unequal": _named((each, *both) for each, both in pairs.items() if both[0] != both[1]),
    }


def check_batch(
    lines: Iterable[Mapping[str, Any]], out: Sequence[Any], errors: Sequence[Any]
) -> dict[str, Any]:
    """Each line of a batch in one of its two files, once."""
    asked, came = (Counter(e["custom_id"] for e in each) for each in (lines, (*out, *errors)))
    return {
        "lines": asked.total(),
        "answers": len(out),
        "errors": len(errors),
        "missing": _named((asked - came).elements()),
        "double": _named((came - asked).elements()),
    }


def _named(what: Iterable[Any]) -> dict[str, Any]:
    """How many, and some of them."""
    found = list(what)
    return {"count": len(found), "some": [str(each) for each in sorted(found, key=str)[:NAMED_MAX]]}


def lines_of(path: str | None) -> Iterator[Any]:
    """The lines of a file of JSON, or none; a client that was killed may have left half a line."""
    if not path or not Path(path).exists():
        return
    for line in Path(path).read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def tokens_of(value: Mapping[str, Any]) -> Tokens:
    """In and out."""
    return int(value["prompt_tokens"]), int(value["completion_tokens"])


def counted_in(answers: Iterable[Record]) -> dict[str, Tokens]:
    """Tokens by request, as the answers say them."""
    values = (each.value for each in answers if each.value)
    return {e["request_id"]: tokens_of(e) for e in values if not e.get("error_code")}


async def check(task: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that the task names."""
    bootstrap, prefix = task["bootstrap"], task["prefix"]
    decoder = Decoder(Path(task["schemas"]), ("Prompt", "Answer", "Usage", "Request"))
    found: dict[str, Any] = {"pairs": {}, "batches": []}
    counted: dict[str, Tokens] = {}
    for pair in task["pairs"]:
        topic, ends = pair["prompts"], Counter[int]()
        prompts = await read(bootstrap, topic, decoder)
        answers = await read(bootstrap, pair["answers"], decoder)
        dead, notes = await read(bootstrap, f"{topic}.dlq", None), lines_of(pair.get("notes"))
        said = check_pair(topic, prompts, answers, dead, notes, ordered=pair["ordered"])
        for each in prompts:
            ends[each.partition] = max(ends[each.partition], each.offset + 1)
        committed = await positions(bootstrap, task["group"], topic)
        said["lag"] = sum(max(0, end - committed.get(at, 0)) for at, end in ends.items())
        found["pairs"][topic] = said
        counted |= counted_in(answers)
    http = list(lines_of(task.get("http")))
    counted |= {note["request_id"]: tokens_of(note) for note in http}
    requests = await read(bootstrap, f"{prefix}requests", decoder)
    usage = await read(bootstrap, f"{prefix}usage", decoder)
    found["usage"] = check_usage(usage, (each.value["request_id"] for each in requests), counted)
    for batch in task["batches"]:
        files = (list(lines_of(batch.get(name))) for name in ("input", "output", "errors"))
        found["batches"].append(check_batch(*files))
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(check(json.loads(Path(sys.argv[1]).read_text())))))
