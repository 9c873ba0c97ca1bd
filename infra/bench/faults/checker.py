"""Checks that every accepted request got one whole and right answer while processes died.

`python infra/bench/faults/checker.py TASK.json` reads the raw topics and the history that clients
wrote, and prints its findings as JSON. Imports nothing of Trivium: reads Avro schemas as files, and
computes the tokens of the simulated engine again. TASK.json has `bootstrap`, `prefix`, `schemas`
(the folder of .avsc files), `history` (the file that `history.py` writes), `engine` with its
`block_size` and `vocabulary` (id and text of each token that the engine samples), and `tenant`: if
not empty, only requests of this tenant are checked. Does not check structured answers, which the
engine samples differently.
"""

import asyncio
import io
import json
import sys
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiokafka
import fastavro
from fastavro.schema import fingerprint, load_schema, to_parsing_canonical_form

SINGLE_OBJECT = b"\xc3\x01"
RECORDS = ("Request", "Work", "Outcome", "TokenFrame")
READ_S, NAMED_MAX = 600.0, 5
MASK, FOLD = (1 << 64) - 1, 0x9E3779B97F4A7C15
STALL_MS = 500  # shorter pauses need no fault to explain them
# A stall may begin this long after the fault that explains it; the first kind that matches counts.
LATE_MS = {"router": 12_000, "gateway": 12_000, "worker": 6_000, "retrieval": 6_000}
BROKER_LATE_MS = 15_000  # from the broker's recovery; the broker takes precedence over all kinds
KINDS = {"prefill": "worker", "decode": "worker", "embedding": "retrieval"}
Record = dict[str, Any]


class RecordDecoder:
    """Decodes values in Avro's single-object encoding that have one of the `RECORDS` schemas."""

    def __init__(self, folder: Path) -> None:
        self._schemas = {}
        for name in RECORDS:
            schema = load_schema(folder / f"trivium.{name}.avsc")
            mark = fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO")
            self._schemas[bytes.fromhex(mark)] = schema

    def decode(self, value: bytes | None) -> Any:
        """Return the decoded record, or None for other kinds and tombstones."""
        if value is None or (schema := self._schemas.get(value[2:10])) is None:
            return None
        assert value[:2] == SINGLE_OBJECT, value[:10]
        return fastavro.schemaless_reader(io.BytesIO(value[10:]), schema, schema)


async def read(bootstrap: str, topic: str, decoder: RecordDecoder) -> list[Record]:
    """Return all records of a topic that have a known schema, in the order of each partition."""
    consumer = aiokafka.AIOKafkaConsumer(
        topic, bootstrap_servers=bootstrap, enable_auto_commit=False, auto_offset_reset="earliest",
        fetch_max_bytes=1 << 24, max_partition_fetch_bytes=1 << 23,
    )  # fmt: skip
    records = []
    async with consumer, asyncio.timeout(READ_S):
        places = consumer.assignment()  # all partitions, as there is no group
        ends = await consumer.end_offsets(places)
        while any([await consumer.position(place) < ends[place] for place in places]):
            for got in (await consumer.getmany(timeout_ms=500)).values():
                records += [record for message in got if (record := decoder.decode(message.value))]
    return records


def mix(value: int) -> int:
    """Scramble a 64-bit integer (splitmix64)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


class AnswerOracle:
    """Computes the simulated engine's tokens from all earlier tokens, the seed and the number."""

    def __init__(self, block_size: int, vocabulary: Sequence[tuple[int, str]]) -> None:
        self._size = block_size
        self._ids = [token_id for token_id, _ in vocabulary]
        self._texts = dict(vocabulary)
        self._factors: list[int] = []  # of the token at each position
        self._cache: dict[tuple[bytes, int, int], list[int]] = {}

    def text(self, token_ids: Iterable[int]) -> str:
        """Return the text of these token ids."""
        return "".join(self._texts.get(token_id, "?") for token_id in token_ids)

    def answer(self, prompt: bytes, sampling: Mapping[str, Any]) -> list[int]:
        """Return the token ids of the answer, which ends only at `max_tokens`."""
        seed = mix((sampling["seed"] or 0) & MASK) | 1 if sampling["temperature"] > 0 else 0
        key = (prompt, seed, sampling["max_tokens"])
        if key not in self._cache:
            self._cache[key] = self._draw(memoryview(prompt).cast("i").tolist(), seed, key[2])
        return self._cache[key]

    def _draw(self, tokens: list[int], seed: int, count: int) -> list[int]:
        folded = whole = open_sum = at = 0
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
    requests: Mapping[str, Record], works: Iterable[Record], engine: AnswerOracle
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
        expected[request_id] = answer = engine.answer(prompt, request["sampling"])
        prior = memoryview(whole[len(prompt) :]).cast("i").tolist()
        if prior != answer[:prior_tokens]:
            odd.append(f"{request_id}: attempt {work['attempt']} goes on from other tokens")
    return expected, odd


def check_outcomes(
    requests: Mapping[str, Record], outcomes: Iterable[Record], expected: Mapping[str, list[int]]
) -> dict[str, Any]:
    """Check that each request has one outcome that counts, of its last attempt."""
    by_id: dict[str, list[Record]] = defaultdict(list)
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
        "requests": len(requests),
        "kinds": dict(Counter(end["kind"] for end in ends.values())),
        "completed": {request_id for request_id, end in ends.items() if end["kind"] == "completed"},
        "without": summarize(requests.keys() - ends.keys()),
        "double": summarize(double),
        "of_no_request": summarize(ends.keys() - requests.keys()),
        "lost": summarize(failures),
        "of_other_lengths": summarize(short),
    }


def check_frames(
    frames: Iterable[Record], expected: Mapping[str, list[int]], engine: AnswerOracle,
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
    answers: list[Record],
    expected: Mapping[str, list[int]],
    completed: set[str],
    engine: AnswerOracle,
) -> dict[str, Any]:
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
        "answers": len(answers),
        "ended": dict(Counter(answer["ended"] for answer in answers)),
        "resumes": sum(answer["resumes"] for answer in answers),
        "tokens": sum(len(answer["token_ids"]) for answer in answers),
        **{name: summarize(labels) for name, labels in faults.items()},
    }


def difference(got: list[int], right: list[int], *, is_whole: bool) -> str:
    """Return how the tokens differ from the right ones: gaps, repeats, wrong, or empty."""
    at = next((n for n, (a, b) in enumerate(zip(got, right, strict=False)) if a != b), len(got))
    if at == len(got) <= len(right):
        return "gaps" if is_whole and len(got) < len(right) else ""
    rest = got[at : at + 3]
    places = [n for n in range(len(right)) if rest == right[n : n + len(rest)]]
    return "wrong" if not places else "repeats" if places[0] < at else "gaps"


def stalls(answers: Iterable[Record], blows: Iterable[Record]) -> dict[str, Any]:
    """Return pauses in answers, from the call to the last event, by cause: the broker if it was
    down; else the first kind in `LATE_MS` with a fault in the pause or shortly before. In s."""
    dealt = sorted((event["at_ms"], kind_of(event["name"])) for event in blows if "how" in event)
    backs = sorted(event["at_ms"] for event in blows if "how" not in event)
    away = [(at, backs[bisect_left(backs, at) :]) for at, kind in dealt if kind == "broker"]
    pauses_s: dict[str, list[float]] = defaultdict(list)
    for answer in answers:
        moments = [answer["asked_ms"], *answer["at_ms"], answer["ended_ms"]]
        for begin, end in zip(moments, moments[1:], strict=False):
            if end - begin < STALL_MS:
                continue
            recent_kinds = {kind for at, kind in dealt if begin - LATE_MS.get(kind, 0) <= at < end}
            cause = next((kind for kind in LATE_MS if kind in recent_kinds), "nothing")
            if any(
                at < end and begin < min(back, default=end) + BROKER_LATE_MS for at, back in away
            ):
                cause = "broker"
            pauses_s[cause].append((end - begin) / 1000)
    shares = {"p50_s": 50, "p99_s": 99, "max_s": 100}
    return {
        cause: {"stalls": len(s), **{n: s[-(-(len(s) - 1) * p // 100)] for n, p in shares.items()}}
        for cause, s in ((cause, sorted(some)) for cause, some in sorted(pauses_s.items()))
    }


def kind_of(name: str) -> str:
    """Return the kind of the process with this name."""
    kind = name.partition("-")[0]
    return KINDS.get(kind, kind)


def summarize(labels: Iterable[str]) -> dict[str, Any]:
    """Return the count of the labels and at most NAMED_MAX of them."""
    examples = sorted(labels)
    return {"count": len(examples), "some": examples[:NAMED_MAX]}


async def check(task: Mapping[str, Any], history: Sequence[Record]) -> dict[str, Any]:
    """Read the topics and check everything that the task names."""
    decoder, topics = RecordDecoder(Path(task["schemas"])), {}
    # Read requests last: they identify all records of other tenants, also of requests in flight.
    for name in ("tokens", "outcomes", "decode", "prefill", "requests"):
        topics[name] = await read(task["bootstrap"], task["prefix"] + name, decoder)
    tenant = task.get("tenant")
    left_out = {
        request["request_id"]
        for request in topics["requests"]
        if (tenant and request["tenant"] != tenant)
        or request["sampling"].get("structured") is not None
    }
    for name in ("requests", "prefill", "decode", "outcomes"):
        topics[name] = [record for record in topics[name] if record["request_id"] not in left_out]
    answers = [event for event in history if event["what"] == "answer"]
    engine = AnswerOracle(task["engine"]["block_size"], task["engine"]["vocabulary"])
    requests = {request["request_id"]: request for request in topics["requests"]}
    expected, odd = expected_of(requests, topics["prefill"] + topics["decode"], engine)
    outcomes = check_outcomes(requests, topics["outcomes"], expected)
    return {
        "clients": check_answers(answers, expected, outcomes.pop("completed"), engine),
        "outcomes": outcomes,
        "frames": check_frames(topics["tokens"], expected, engine, left_out),
        "orders": summarize(odd),
        "stalls": stalls(answers, [event for event in history if event["what"] != "answer"]),
    }


if __name__ == "__main__":
    task = json.loads(Path(sys.argv[1]).read_text())
    lines = map(json.loads, Path(task["history"]).read_text().splitlines())
    print(json.dumps(asyncio.run(check(task, list(lines)))))
