"""Checks clients' answers against the raw topics: `python infra/bench/faults/checker.py TASK`.

Imports nothing of Trivium: reads Avro schemas as files, and computes the simulated engine's tokens
again. Prints its findings as JSON. The task has `bootstrap`, `prefix`, and `schemas`, a folder.
With `history`, a file of what clients saw while processes died, every accepted request must have
one whole and right answer; `engine` has the block size and the vocabulary, and only requests of
`tenant` are checked if it is not empty, without structured answers, which are sampled differently.
With `pairs`, topics of prompts and answers and the notes of their senders, every prompt must have
one answer, and usage must equal what clients counted: those, and `http` clients by their notes. The
files of `batches` are checked, too, and how far `group` has committed.
"""

import asyncio
import io
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import aiokafka
import fastavro
from aiokafka.admin import AIOKafkaAdminClient
from fastavro.schema import fingerprint, load_schema, to_parsing_canonical_form
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # ships no types

SINGLE_OBJECT = b"\xc3\x01"
RECORDS = ("Request", "Work", "Outcome", "TokenFrame", "Prompt", "Answer", "Usage")
COORDINATES = tuple(f"trivium-prompt-{name}" for name in ("topic", "partition", "offset"))
READ_S, NAMED_MAX = 600.0, 5
MASK, FOLD = (1 << 64) - 1, 0x9E3779B97F4A7C15
Fields = dict[str, Any]
Pair = tuple[int, int]  # a partition and an offset, or counts of tokens


class Record(NamedTuple):
    """One record with its value decoded. The value of a tombstone is None."""

    partition: int
    offset: int
    key: bytes | None
    value: Any
    headers: Mapping[str, bytes]


class RecordDecoder:
    """Decodes values that are JSON, or one of `RECORDS` in Avro's single-object encoding."""

    def __init__(self, folder: Path) -> None:
        self._schemas = {}
        for name in RECORDS:
            schema = load_schema(folder / f"trivium.{name}.avsc")
            mark = fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO")
            self._schemas[bytes.fromhex(mark)] = schema

    def decode(self, value: bytes | None) -> Any:
        """Return the decoded value, or None for other kinds of records and tombstones."""
        if value is not None and value[:2] != SINGLE_OBJECT:
            return json.loads(value)
        if value is None or (schema := self._schemas.get(value[2:10])) is None:
            return None
        return fastavro.schemaless_reader(io.BytesIO(value[10:]), schema, schema)


async def ask_admin(bootstrap: str, method: str, *arguments: Any) -> Any:
    """Call a method of Kafka's admin client."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        return await getattr(admin, method)(*arguments)
    finally:
        await admin.close()


async def read(
    bootstrap: str, topic: str, decoder: RecordDecoder | None, isolation: str = "read_committed"
) -> list[Record]:
    """Return all records, none if there is no topic; raw values without a decoder."""
    (metadata,) = await ask_admin(bootstrap, "describe_topics", [topic])
    consumer = aiokafka.AIOKafkaConsumer(
        bootstrap_servers=bootstrap, isolation_level=isolation, enable_auto_commit=False,
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
    offsets = await ask_admin(bootstrap, "list_consumer_group_offsets", group)
    return {at.partition: position.offset for at, position in offsets.items() if at.topic == topic}


def mix(value: int) -> int:
    """Scramble a 64-bit integer (splitmix64)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


class AnswerOracle:
    """Computes the simulated engine's tokens from the name of the model or adapter, all earlier
    tokens, the seed and the number. The name "sim" counts as none."""

    def __init__(self, block_size: int, vocabulary: Sequence[tuple[int, str]]) -> None:
        self._size = block_size
        self._ids = [token_id for token_id, _ in vocabulary]
        self._texts = dict(vocabulary)
        self._factors: list[int] = []  # of the token at each position
        self._cache: dict[tuple[str, bytes, int, int], list[int]] = {}

    def text(self, token_ids: Iterable[int]) -> str:
        """Return the text of these token ids."""
        return "".join(self._texts.get(token_id, "?") for token_id in token_ids)

    def answer(self, prompt: bytes, sampling: Mapping[str, Any], name: str = "sim") -> list[int]:
        """Return the token ids of the answer, which ends only at `max_tokens`."""
        seed = mix((sampling["seed"] or 0) & MASK) | 1 if sampling["temperature"] > 0 else 0
        key = (name, prompt, seed, sampling["max_tokens"])
        if key not in self._cache:
            digest = b"" if name == "sim" else blake2b(name.encode(), digest_size=8).digest()
            tokens, start = memoryview(prompt).cast("i").tolist(), int.from_bytes(digest, "little")
            self._cache[key] = self._draw(tokens, start, seed, sampling["max_tokens"])
        return self._cache[key]

    def _draw(self, tokens: list[int], start: int, seed: int, count: int) -> list[int]:
        folded, whole, open_sum, at = 0, 0, start, 0
        prompt_tokens, total = len(tokens), len(tokens) + count
        self._factors += [mix((n + 1) * FOLD & MASK) for n in range(len(self._factors), total)]
        while True:
            while at < len(tokens):
                open_sum = (open_sum + (tokens[at] + 1) * self._factors[at]) & MASK
                at += 1
                if not at % self._size:
                    whole, open_sum = (whole + open_sum) & MASK, 0
                    folded = mix((folded + whole * FOLD) & MASK)
            if len(tokens) == total:
                return tokens[prompt_tokens:]
            state = (folded + open_sum * FOLD) & MASK
            number = len(tokens) - prompt_tokens + 1
            tokens.append(self._ids[mix(state ^ (seed * number & MASK)) % len(self._ids)])


def expected_of(
    requests: Mapping[str, Fields], works: Iterable[Fields], engine: AnswerOracle
) -> tuple[dict[str, list[int]], list[str]]:
    """Return the right tokens of each request that a worker received, and contradictory work."""
    expected: dict[str, list[int]] = {}
    prompts: dict[str, bytes] = {}
    odd = []
    for work in works:
        request_id = work["request_id"]
        if (request := requests.get(request_id)) is None:
            odd.append(f"{request_id}: work of no request")
            continue
        whole, prior_tokens = work["prompt_tokens"], work.get("prior_tokens") or 0
        prompt = whole[: len(whole) - 4 * prior_tokens]
        if prompts.setdefault(request_id, prompt) != prompt:
            odd.append(f"{request_id}: attempt {work['attempt']} has another prompt")
        if not request["retrieval"] and prompt != request["prompt_tokens"]:
            odd.append(f"{request_id}: attempt {work['attempt']} has not its own prompt")
        name = request.get("adapter") or request.get("model") or "sim"
        if name != (work.get("adapter") or work.get("model") or "sim"):
            odd.append(f"{request_id}: attempt {work['attempt']} is of another model or adapter")
        expected[request_id] = answer = engine.answer(prompt, request["sampling"], name)
        prior = memoryview(whole[len(prompt) :]).cast("i").tolist()
        if prior != answer[:prior_tokens]:
            odd.append(f"{request_id}: attempt {work['attempt']} goes on from other tokens")
    return expected, odd


def check_outcomes(
    requests: Mapping[str, Fields], outcomes: Iterable[Fields], expected: Mapping[str, list[int]]
) -> dict[str, Any]:
    """Check that each request has one outcome that counts, of its last attempt."""
    by_id: dict[str, list[Fields]] = defaultdict(list)
    for outcome in outcomes:
        by_id[outcome["request_id"]].append(outcome)
    ends, double, failures, short = {}, [], [], []
    for request_id, several in by_id.items():
        highest = max(outcome["attempt"] for outcome in several)
        counting = [outcome for outcome in several if outcome["attempt"] == highest]
        ends[request_id] = end = counting[0]
        if any(outcome != end for outcome in counting):
            double.append(request_id)
        if end["kind"] not in ("completed", "cancelled"):
            failures.append(f"{request_id}: {end['kind']}: {(end['error'] or {}).get('message')}")
        right = len(expected.get(request_id, ()))
        if end["kind"] == "completed" and end["completion_tokens"] != right:
            short.append(f"{request_id}: {end['completion_tokens']} tokens of {right}")
    return {
        "requests": len(requests), "kinds": dict(Counter(end["kind"] for end in ends.values())),
        "completed": {request_id for request_id, end in ends.items() if end["kind"] == "completed"},
        "without": summarize(requests.keys() - ends.keys()), "double": summarize(double),
        "of_no_request": summarize(ends.keys() - requests.keys()),
        "lost": summarize(failures),
        "of_other_lengths": summarize(short),
    }  # fmt: skip


def check_frames(
    frames: Iterable[Fields], expected: Mapping[str, list[int]], engine: AnswerOracle,
    left_out: Container[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Check that rows of tokens have no gap, no wrong token, and none after an attempt's end. An
    attempt may begin where tokens of earlier attempts end. Gateways drop tokens that repeat."""
    lengths: dict[str, int] = {}  # by request, over all attempts
    end_seqs: dict[tuple[str, int], int] = {}
    rows, gaps, wrong, beyond = 0, [], [], []
    columns = ("request_ids", "attempts", "first_seqs", "token_counts", "texts")
    for frame in frames:
        token_ids, at = frame["token_ids"], 0
        each_row = zip(*(frame[name] for name in columns), strict=True)
        for request_id, attempt, first, count, text in each_row:
            row, at, last = token_ids[at : at + count], at + count, first + count
            if request_id in left_out:
                continue
            rows += 1
            name = f"{request_id}: attempt {attempt}, token {first}"
            if first > lengths.get(request_id, 0):
                gaps.append(name)
            if row != expected.get(request_id, [])[first:last] or text != engine.text(row):
                wrong.append(name)
            if last > end_seqs.get((request_id, attempt), last):
                beyond.append(name)
            lengths[request_id] = max(lengths.get(request_id, 0), last)
        end_seqs |= {(end["request_id"], end["attempt"]): end["seq"] for end in frame["ends"]}
    faults = {"gaps": gaps, "wrong": wrong, "beyond_the_end": beyond}
    return {"rows": rows, **{name: summarize(labels) for name, labels in faults.items()}}


def check_answers(
    answers: list[Fields], expected: Mapping[str, list[int]], completed: set[str],
    engine: AnswerOracle,
) -> dict[str, Any]:  # fmt: skip
    """Check that clients read the right tokens from the first on, and whole answers to the end."""
    names = ("gaps", "repeats", "wrong", "not_answered", "not_on_the_log")
    faults: dict[str, list[str]] = {name: [] for name in names}
    for answer in answers:
        request_id, got = answer["request_id"], answer["token_ids"]
        name = f"{request_id or answer['number']}: {answer['ended']} after {len(got)} tokens"
        if answer["ended"] not in ("whole", "hung up"):
            faults["not_answered"].append(f"{name}: {answer['detail']}")
        if got and request_id not in expected:
            faults["not_on_the_log"].append(name)
            continue
        fault = difference(got, expected.get(request_id, []), is_whole=answer["ended"] == "whole")
        if fault:
            faults[fault].append(name)
        elif answer["text"] != engine.text(got):
            faults["wrong"].append(name)
        if answer["ended"] == "whole" and request_id not in completed:
            faults["not_on_the_log"].append(f"{name}: no outcome says completed")
    return {
        "answers": len(answers), "ended": dict(Counter(answer["ended"] for answer in answers)),
        "resumes": sum(answer["resumes"] for answer in answers),
        "tokens": sum(len(answer["token_ids"]) for answer in answers),
        **{name: summarize(labels) for name, labels in faults.items()},
    }  # fmt: skip


def difference(got: list[int], right: list[int], *, is_whole: bool) -> str:
    """Return how the tokens differ from the right ones: gaps, repeats, wrong, or empty."""
    at = next((n for n, (a, b) in enumerate(zip(got, right, strict=False)) if a != b), len(got))
    if at == len(got) <= len(right):
        return "gaps" if is_whole and len(got) < len(right) else ""
    rest = got[at : at + 3]
    places = [n for n in range(len(right)) if rest == right[n : n + len(rest)]]
    return "wrong" if not places else "repeats" if places[0] < at else "gaps"


async def check_history(task: Mapping[str, Any], decoder: RecordDecoder) -> dict[str, Any]:
    """Check every accepted request and what clients saw of it."""
    bootstrap, prefix, topics = task["bootstrap"], task["prefix"], dict[str, list[Fields]]()
    # Read requests last: they identify all records of other tenants, also of requests in flight.
    for name in ("tokens", "outcomes", "decode", "prefill", "requests"):
        records = await read(bootstrap, prefix + name, decoder, "read_uncommitted")
        topics[name] = [record.value for record in records if record.value is not None]
    tenant = task.get("tenant")
    left_out = {
        request["request_id"] for request in topics["requests"]
        if (tenant and request["tenant"] != tenant)
        or request["sampling"].get("structured") or request.get("parsing")
    }  # fmt: skip
    for name in ("requests", "prefill", "decode", "outcomes"):
        topics[name] = [record for record in topics[name] if record["request_id"] not in left_out]
    answers = [event for event in lines_of(task["history"]) if event["what"] == "answer"]
    engine = AnswerOracle(task["engine"]["block_size"], task["engine"]["vocabulary"])
    requests = {request["request_id"]: request for request in topics["requests"]}
    expected, odd = expected_of(requests, topics["prefill"] + topics["decode"], engine)
    outcomes = check_outcomes(requests, topics["outcomes"], expected)
    return {
        "clients": check_answers(answers, expected, outcomes.pop("completed"), engine),
        "frames": check_frames(topics["tokens"], expected, engine, left_out),
        "outcomes": outcomes, "orders": summarize(odd),
    }  # fmt: skip


def check_pair(
    topic: str, prompts: Sequence[Record], answers: Sequence[Record], dead: Sequence[Record],
    notes: Iterable[Mapping[str, Any]], *, ordered: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return counts of missing, double and reordered answers for one pair of topics."""
    by_place = {(prompt.partition, prompt.offset): prompt for prompt in prompts}
    answered: Counter[Pair] = Counter()
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
        "sent_but_not_there": summarize(noted - by_place.keys()),
        "answers": len(answers),
        "missing": summarize(by_place.keys() - answered.keys()),
        "double": summarize(place for place, count in answered.items() if count > 1),
        "of_no_prompt": summarize(foreign),
        "under_another_key": summarize(misplaced),
        "out_of_order": summarize(out_of_order) if ordered else None,
        "errors": dict(errors),
        "dead_letters": len(dead),
        "errors_without_dead_letter": max(0, errors.total() - len(dead)),
        "forms": check_forms(by_place, answers),
    }


def place_of(answer: Record) -> Pair | None:
    """Return partition and offset of the answered prompt, or None if header and value differ."""
    try:
        place = int(answer.headers[COORDINATES[1]]), int(answer.headers[COORDINATES[2]])
    except (KeyError, ValueError):
        return None
    value = answer.value or dict(zip(("prompt_partition", "prompt_offset"), place, strict=True))
    return place if (value["prompt_partition"], value["prompt_offset"]) == place else None


def check_forms(prompts: Mapping[Pair, Record], answers: Sequence[Record]) -> dict[str, Any]:
    """Count answers to prompts with a JSON schema, and those that violate it, as errors do."""
    form_count, invalid, validators = 0, [], dict[str, Any]()
    for answer in answers:
        place = place_of(answer)
        prompt = prompts.get(place) if place else None
        schema = schema_of(prompt.value) if prompt else None
        if schema is None:
            continue
        form_count += 1
        validator, is_valid = (
            validators.setdefault(str(schema), Draft202012Validator(schema)),
            False,
        )
        text: Any = (answer.value or {}).get("text")
        with suppress(TypeError, ValueError):  # no text, or no JSON
            is_valid = validator.is_valid(json.loads(text))
        if not is_valid:
            invalid.append(place)
    return {"wanted": form_count, "invalid": summarize(invalid)}


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


def check_usage(
    usage: Sequence[Record], accepted: Set[str], counted: Mapping[str, Pair]
) -> dict[str, Any]:
    """Compare usage records with requests and clients' counts, and find gaps in their numbers."""
    record_counts = Counter(record.value["request_id"] for record in usage)
    used = {record.value["request_id"]: tokens_of(record.value) for record in usage}
    numbers: dict[int, list[int]] = defaultdict(list)
    for record in usage:
        numbers[record.partition].append(record.value["number"])
    pairs = {name: (tokens, used.get(name, (0, 0))) for name, tokens in counted.items()}
    return {
        "records": len(usage), "requests": len(accepted),
        "requests_without_record": summarize(accepted - record_counts.keys()),
        "records_without_request": summarize(record_counts.keys() - accepted),
        "double": summarize(name for name, count in record_counts.items() if count > 1),
        "gaps": sum(has != list(range(len(has))) for has in numbers.values()),
        "counted_by_clients": len(counted),
        "tokens_counted_by_clients": sum(map(sum, counted.values())),
        "difference_tokens": sum(
            abs(a - b) for tokens, has in pairs.values() for a, b in zip(tokens, has, strict=True)
        ),
        "unequal": summarize((name, *both) for name, both in pairs.items() if both[0] != both[1]),
    }  # fmt: skip


def check_batch(
    lines: Iterable[Mapping[str, Any]], out: Sequence[Any], errors: Sequence[Any]
) -> dict[str, Any]:
    """Return which lines of a batch are missing or double in its two result files."""
    line_ids = Counter(line["custom_id"] for line in lines)
    answer_ids = Counter(answer["custom_id"] for answer in (*out, *errors))
    return {
        "lines": line_ids.total(), "answers": len(out), "errors": len(errors),
        "missing": summarize((line_ids - answer_ids).elements()),
        "double": summarize((answer_ids - line_ids).elements()),
    }  # fmt: skip


def summarize(labels: Iterable[Any]) -> dict[str, Any]:
    """Return the count of the labels and at most NAMED_MAX of them."""
    texts = sorted(map(str, labels))
    return {"count": len(texts), "some": texts[:NAMED_MAX]}


def lines_of(path: str | None) -> Iterator[Any]:
    """Yield the values of a JSON Lines file. A killed client may have left half a line: skip it."""
    if not path or not Path(path).exists():
        return
    for line in Path(path).read_text().splitlines():
        with suppress(ValueError):
            yield json.loads(line)


def tokens_of(value: Mapping[str, Any]) -> Pair:
    """Return the prompt and completion token counts of a record."""
    return int(value["prompt_tokens"]), int(value["completion_tokens"])


def counted_in(answers: Iterable[Record]) -> dict[str, Pair]:
    """Return the token counts that the answers report, by request id."""
    values = (answer.value for answer in answers if answer.value)
    return {e["request_id"]: tokens_of(e) for e in values if not e.get("error_code")}


async def check_pairs(task: Mapping[str, Any], decoder: RecordDecoder) -> dict[str, Any]:
    """Check every prompt, batch and usage record."""
    bootstrap, prefix = task["bootstrap"], task["prefix"]
    findings: dict[str, Any] = {"pairs": {}, "batches": []}
    counted: dict[str, Pair] = {}
    for pair in task["pairs"]:
        topic = pair["prompts"]
        prompts = await read(bootstrap, topic, decoder)
        answers = await read(bootstrap, pair["answers"], decoder)
        dead, notes = await read(bootstrap, f"{topic}.dlq", None), lines_of(pair.get("notes"))
        pair_findings = check_pair(topic, prompts, answers, dead, notes, ordered=pair["ordered"])
        ends = {prompt.partition: prompt.offset + 1 for prompt in prompts}  # of the last one
        committed = await positions(bootstrap, task["group"], topic)
        pair_findings["lag"] = sum(max(0, end - committed.get(at, 0)) for at, end in ends.items())
        findings["pairs"][topic] = pair_findings
        counted |= counted_in(answers)
    counted |= {note["request_id"]: tokens_of(note) for note in lines_of(task.get("http"))}
    requests = await read(bootstrap, f"{prefix}requests", decoder)
    usage = await read(bootstrap, f"{prefix}usage", decoder)
    request_ids = {request.value["request_id"] for request in requests}
    findings["usage"] = check_usage(usage, request_ids, counted)
    for batch in task["batches"]:
        files = (list(lines_of(batch.get(name))) for name in ("input", "output", "errors"))
        findings["batches"].append(check_batch(*files))
    return findings


async def check(task: Mapping[str, Any]) -> dict[str, Any]:
    """Read the topics and check everything that the task names."""
    run = check_history if "history" in task else check_pairs
    return await run(task, RecordDecoder(Path(task["schemas"])))


if __name__ == "__main__":
    print(json.dumps(asyncio.run(check(json.loads(Path(sys.argv[1]).read_text())))))
