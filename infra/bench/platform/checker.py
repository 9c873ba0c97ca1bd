"""Checks that each prompt has one answer: `python infra/bench/platform/checker.py TASK.json`.

Reads the committed records of the raw topics and the notes that clients wrote as they sent, and
prints its findings as JSON. Imports nothing of Trivium; reads the Avro schemas as files. TASK.json
has `bootstrap`, `prefix`, `schemas` (the folder of .avsc files), `group`, `pairs` (each with
`prompts`, `answers`, `notes`, `ordered`), `http` (notes of HTTP clients) and `batches` (each with
`input`, `output`, `errors`).
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
    """One record with its value decoded. The value of a tombstone is None."""

    partition: int
    offset: int
    key: bytes | None
    value: Any
    headers: Mapping[str, bytes]


class ValueDecoder:
    """Decodes values that are JSON or Avro in single-object encoding."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self._schemas = {}
        for name in names:
            schema = load_schema(folder / f"trivium.{name}.avsc")
            mark = fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO")
            self._schemas[bytes.fromhex(mark)] = schema

    def decode(self, value: bytes | None) -> Any:
        """Return the value as decoded from JSON or Avro; None for a tombstone."""
        if value is None:
            return None
        if value[:2] != SINGLE_OBJECT:
            return json.loads(value)
        schema = self._schemas[value[2:10]]
        return fastavro.schemaless_reader(io.BytesIO(value[10:]), schema, schema)


@asynccontextmanager
async def _admin_client(bootstrap: str) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


async def read(bootstrap: str, topic: str, decoder: ValueDecoder | None) -> list[Record]:
    """Return all committed records, none if there is no topic; raw values without a decoder."""
    async with _admin_client(bootstrap) as admin:
        (metadata,) = await admin.describe_topics([topic])
    consumer = aiokafka.AIOKafkaConsumer(
        bootstrap_servers=bootstrap, isolation_level="read_committed", enable_auto_commit=False,
        auto_offset_reset="earliest", fetch_max_bytes=1 << 24, max_partition_fetch_bytes=1 << 23,
    )  # fmt: skip
    records: list[Record] = []
    async with consumer, asyncio.timeout(READ_S):
        numbers = [partition["partition"] for partition in metadata["partitions"]]
        places = [aiokafka.TopicPartition(topic, number) for number in numbers]
        consumer.assign(places)
        ends = await consumer.end_offsets(places)
        while any([await consumer.position(place) < ends[place] for place in places]):
            for got in (await consumer.getmany(timeout_ms=500)).values():
                for record in got:
                    value = decoder.decode(record.value) if decoder else record.value
                    headers, at = dict(record.headers), (record.partition, record.offset)
                    records.append(Record(*at, record.key, value, headers))
    return records


async def positions(bootstrap: str, group: str, topic: str) -> dict[int, int]:
    """Return the group's committed offset by partition, as tools that compute the lag read it."""
    async with _admin_client(bootstrap) as admin:
        offsets = await admin.list_consumer_group_offsets(group)
    return {at.partition: position.offset for at, position in offsets.items() if at.topic == topic}


def check_pair(
    topic: str, prompts: Sequence[Record], answers: Sequence[Record], dead: Sequence[Record],
    notes: Iterable[Mapping[str, Any]], *, ordered: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return counts of missing, double and reordered answers for one pair of topics."""
    by_place = {(prompt.partition, prompt.offset): prompt for prompt in prompts}
    answered: Counter[tuple[int, int]] = Counter()
    foreign, misplaced, out_of_order = [], [], []
    latest: dict[tuple[int, bytes | None], int] = {}
    for answer in answers:
        place = place_of(answer)
        prompt = by_place.get(place) if place else None
        if place is None or prompt is None or answer.headers[COORDINATES[0]].decode() != topic:
            foreign.append((answer.partition, answer.offset))
            continue
        answered[place] += 1
        if (prompt.key, prompt.partition) != (answer.key, answer.partition):
            misplaced.append(place)
        line = (prompt.partition, prompt.key)
        if place[1] < latest.get(line, -1):
            out_of_order.append(place)
        latest[line] = max(place[1], latest.get(line, -1))
    noted = {(note["p"], note["o"]) for note in notes}
    codes = (answer.value.get("error_code") for answer in answers if answer.value)
    errors = Counter(code for code in codes if code)
    return {
        "prompts": len(prompts),
        "sent": len(noted),
        "sent_but_not_there": _summarize(noted - by_place.keys()),
        "answers": len(answers),
        "missing": _summarize(by_place.keys() - answered.keys()),
        "double": _summarize(place for place, count in answered.items() if count > 1),
        "of_no_prompt": _summarize(foreign),
        "under_another_key": _summarize(misplaced),
        "out_of_order": _summarize(out_of_order) if ordered else None,
        "errors": dict(errors),
        "dead_letters": len(dead),
        "errors_without_dead_letter": max(0, errors.total() - len(dead)),
        "forms": check_forms(by_place, answers),
    }


def place_of(answer: Record) -> tuple[int, int] | None:
    """Return partition and offset of the answered prompt, or None if header and value differ."""
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
    """Count answers to prompts with a JSON schema, and those that violate it, as errors do."""
    form_count, invalid, validators = 0, [], dict[str, Any]()
    for answer in answers:
        place = place_of(answer)
        prompt = prompts.get(place) if place else None
        schema = schema_of(prompt.value) if prompt else None
        if schema is None:
            continue
        form_count += 1
        validator = validators.setdefault(json.dumps(schema), Draft202012Validator(schema))
        if not is_valid(validator, (answer.value or {}).get("text")):
            invalid.append(place)
    return {"wanted": form_count, "invalid": _summarize(invalid)}


def schema_of(prompt: Any) -> Any:
    """Return the JSON schema of a prompt or of the call in a line of a batch, or None."""
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
    """Return whether a text is JSON that the validator accepts."""
    with suppress(TypeError, ValueError):  # no text, or no JSON
        return bool(validator.is_valid(json.loads(text)))
    return False


def check_usage(
    usage: Sequence[Record], requests: Iterable[str], counted: Mapping[str, Tokens]
) -> dict[str, Any]:
    """Compare usage records with requests and clients' counts, and find gaps in their numbers."""
    record_counts = Counter(record.value["request_id"] for record in usage)
    used = {record.value["request_id"]: tokens_of(record.value) for record in usage}
    numbers: dict[int, list[int]] = defaultdict(list)
    for record in usage:
        numbers[record.partition].append(record.value["number"])
    accepted = set(requests)
    pairs = {name: (tokens, used.get(name, (0, 0))) for name, tokens in counted.items()}
    double = (name for name, count in record_counts.items() if count > 1)
    unequal = ((name, *both) for name, both in pairs.items() if both[0] != both[1])
    return {
        "records": len(usage),
        "requests": len(accepted),
        "requests_without_record": _summarize(accepted - record_counts.keys()),
        "records_without_request": _summarize(record_counts.keys() - accepted),
        "double": _summarize(double),
        "gaps": sum(has != list(range(len(has))) for has in numbers.values()),
        "counted_by_clients": len(counted),
        "tokens_counted_by_clients": sum(map(sum, counted.values())),
        "difference_tokens": sum(
            abs(a - b) for tokens, has in pairs.values() for a, b in zip(tokens, has, strict=True)
        ),
        "unequal": _summarize(unequal),
    }


def check_batch(
    lines: Iterable[Mapping[str, Any]], out: Sequence[Any], errors: Sequence[Any]
) -> dict[str, Any]:
    """Return which lines of a batch are missing or double in its two result files."""
    line_ids = Counter(line["custom_id"] for line in lines)
    answer_ids = Counter(answer["custom_id"] for answer in (*out, *errors))
    return {
        "lines": line_ids.total(),
        "answers": len(out),
        "errors": len(errors),
        "missing": _summarize((line_ids - answer_ids).elements()),
        "double": _summarize((answer_ids - line_ids).elements()),
    }


def _summarize(labels: Iterable[Any]) -> dict[str, Any]:
    """Return the count of the labels and at most NAMED_MAX of them."""
    texts = sorted(map(str, labels))
    return {"count": len(texts), "some": texts[:NAMED_MAX]}


def lines_of(path: str | None) -> Iterator[Any]:
    """Yield the values of a JSON Lines file. A killed client may have left half a line: skip it."""
    if not path or not Path(path).exists():
        return
    for line in Path(path).read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def tokens_of(value: Mapping[str, Any]) -> Tokens:
    """Return the prompt and completion token counts of a record."""
    return int(value["prompt_tokens"]), int(value["completion_tokens"])


def counted_in(answers: Iterable[Record]) -> dict[str, Tokens]:
    """Return the token counts that the answers report, by request id."""
    values = (answer.value for answer in answers if answer.value)
    return {e["request_id"]: tokens_of(e) for e in values if not e.get("error_code")}


async def check(task: Mapping[str, Any]) -> dict[str, Any]:
    """Run every check of the task and return the findings."""
    bootstrap, prefix = task["bootstrap"], task["prefix"]
    decoder = ValueDecoder(Path(task["schemas"]), ("Prompt", "Answer", "Usage", "Request"))
    findings: dict[str, Any] = {"pairs": {}, "batches": []}
    counted: dict[str, Tokens] = {}
    for pair in task["pairs"]:
        topic, ends = pair["prompts"], Counter[int]()
        prompts = await read(bootstrap, topic, decoder)
        answers = await read(bootstrap, pair["answers"], decoder)
        dead, notes = await read(bootstrap, f"{topic}.dlq", None), lines_of(pair.get("notes"))
        pair_findings = check_pair(topic, prompts, answers, dead, notes, ordered=pair["ordered"])
        for prompt in prompts:
            ends[prompt.partition] = max(ends[prompt.partition], prompt.offset + 1)
        committed = await positions(bootstrap, task["group"], topic)
        pair_findings["lag"] = sum(max(0, end - committed.get(at, 0)) for at, end in ends.items())
        findings["pairs"][topic] = pair_findings
        counted |= counted_in(answers)
    http = list(lines_of(task.get("http")))
    counted |= {note["request_id"]: tokens_of(note) for note in http}
    requests = await read(bootstrap, f"{prefix}requests", decoder)
    usage = await read(bootstrap, f"{prefix}usage", decoder)
    accepted = (request.value["request_id"] for request in requests)
    findings["usage"] = check_usage(usage, accepted, counted)
    for batch in task["batches"]:
        files = (list(lines_of(batch.get(name))) for name in ("input", "output", "errors"))
        findings["batches"].append(check_batch(*files))
    return findings


if __name__ == "__main__":
    print(json.dumps(asyncio.run(check(json.loads(Path(sys.argv[1]).read_text())))))
