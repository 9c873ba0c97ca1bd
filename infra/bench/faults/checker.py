"""Whether clients got what was accepted, once, whole and right, whatever died: a second program.

`python infra/bench/faults/checker.py TASK.json` reads the raw topics and the history that clients
wrote, and prints its findings as JSON. Imports nothing of what it judges: Avro schemas are read as
files, and what the simulated engine has to say is computed here again. TASK.json says `bootstrap`,
`prefix`, `schemas` (the folder of .avsc files), `history` (lines that `history.py` writes),
`engine` with its `block_size` and `vocabulary`: id and text of each token that may be drawn, and
`tenant`: if not empty, whose requests are judged. Answers of a certain form are not: the engine
draws them otherwise.
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
STALL_MS = 500  # shorter pauses are not for faults to explain
# A stall may begin so long after what explains it; the first that does counts.
LATE_MS = {"router": 12_000, "gateway": 12_000, "worker": 6_000, "retrieval": 6_000}
BROKER_LATE_MS = 15_000  # before all others: so long after it is back
KINDS = {"prefill": "worker", "decode": "worker", "embedding": "retrieval"}
Record = dict[str, Any]


class Decoder:
    """Values in Avro's single-object framing; what is of another kind, or deleted, is None."""

    def __init__(self, folder: Path) -> None:
        self._schemas = {}
        for name in RECORDS:
            schema = load_schema(folder / f"trivium.{name}.avsc")
            mark = fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO")
            self._schemas[bytes.fromhex(mark)] = schema

    def decode(self, value: bytes | None) -> Any:
        """What it says."""
        if value is None or (schema := self._schemas.get(value[2:10])) is None:
            return None
        assert value[:2] == SINGLE_OBJECT, value[:10]
        return fastavro.schemaless_reader(io.BytesIO(value[10:]), schema, schema)


async def read(bootstrap: str, topic: str, decoder: Decoder) -> list[Record]:
    """All records of a topic that are of a known kind, in the order of each partition."""
    consumer = aiokafka.AIOKafkaConsumer(
        topic, bootstrap_servers=bootstrap, enable_auto_commit=False, auto_offset_reset="earliest",
        fetch_max_bytes=1 << 24, max_partition_fetch_bytes=1 << 23,
    )  # fmt: skip
    records = []
    async with consumer, asyncio.timeout(READ_S):
        places = consumer.assignment()  # all of them: there is no group
        ends = await consumer.end_offsets(places)
        while any([await consumer.position(place) < ends[place] for place in places]):
            for got in (await consumer.getmany(timeout_ms=500)).values():
                records += [found for each in got if (found := decoder.decode(each.value))]
    return records


def mix(value: int) -> int:
    """Scramble a 64-bit integer (splitmix64)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


class Engine:
    """What the simulated engine says: a function of all tokens before, of seed and number."""

    def __init__(self, block_size: int, vocabulary: Sequence[tuple[int, str]]) -> None:
        self._size = block_size
        self._ids = [token_id for token_id, _ in vocabulary]
        self._texts = dict(vocabulary)
        self._factors: list[int] = []  # of the token at each position
        self._known: dict[tuple[bytes, int, int], list[int]] = {}

    def text(self, token_ids: Iterable[int]) -> str:
        """Of drawn tokens."""
        return "".join(self._texts.get(each, "?") for each in token_ids)

    def answer(self, prompt: bytes, sampling: Mapping[str, Any]) -> list[int]:
        """Up to its limit; nothing else ends it."""
        seed = mix((sampling["seed"] or 0) & MASK) | 1 if sampling["temperature"] > 0 else 0
        key = (prompt, seed, sampling["max_tokens"])
        if key not in self._known:
            self._known[key] = self._draw(memoryview(prompt).cast("i").tolist(), seed, key[2])
        return self._known[key]

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
    requests: Mapping[str, Record], works: Iterable[Record], engine: Engine
) -> tuple[dict[str, list[int]], list[str]]:
    """The right tokens of each request that was sent to a worker; orders that contradict it."""
    expected: dict[str, list[int]] = {}
    prompts: dict[str, bytes] = {}
    odd = []
    for work in works:
        request_id = work["request_id"]
        if (request := requests.get(request_id)) is None:
            odd.append(f"{request_id}: work of no request")
            continue
        whole, said = work["prompt_tokens"], work.get("said") or 0
        prompt = whole[: len(whole) - 4 * said]
        if prompts.setdefault(request_id, prompt) != prompt:
            odd.append(f"{request_id}: attempt {work['attempt']} has another prompt")
        if not request["retrieval"] and prompt != request["prompt_tokens"]:
            odd.append(f"{request_id}: attempt {work['attempt']} has not its own prompt")
        expected[request_id] = answer = engine.answer(prompt, request["sampling"])
        if said and memoryview(whole[-4 * said :]).cast("i").tolist() != answer[:said]:
            odd.append(f"{request_id}: attempt {work['attempt']} goes on from other tokens")
    return expected, odd


def check_outcomes(
    requests: Mapping[str, Record], outcomes: Iterable[Record], expected: Mapping[str, list[int]]
) -> dict[str, Any]:
    """One that counts for each request: of several that of the highest attempt."""
    by_id: dict[str, list[Record]] = defaultdict(list)
    for each in outcomes:
        by_id[each["request_id"]].append(each)
    ends, double, lost, short = {}, [], [], []
    for request_id, several in by_id.items():
        highest = max(each["attempt"] for each in several)
        counting = [each for each in several if each["attempt"] == highest]
        ends[request_id] = end = counting[0]
        if any(each != end for each in counting):
            double.append(request_id)
        if end["kind"] not in ("completed", "cancelled"):
            lost.append(f"{request_id}: {end['kind']}: {(end['error'] or {}).get('message')}")
        right = len(expected.get(request_id, ()))
        if end["kind"] == "completed" and end["completion_tokens"] != right:
            short.append(f"{request_id}: {end['completion_tokens']} tokens of {right}")
    return {
        "requests": len(requests),
        "kinds": dict(Counter(end["kind"] for end in ends.values())),
        "completed": {each for each, end in ends.items() if end["kind"] == "completed"},
        "without": named(requests.keys() - ends.keys()),
        "double": named(double),
        "of_no_request": named(ends.keys() - requests.keys()),
        "lost": named(lost),
        "of_other_lengths": named(short),
    }


def check_frames(
    frames: Iterable[Record], expected: Mapping[str, list[int]], engine: Engine,
    left_out: Container[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Rows of tokens on the log: no gap, nothing wrong, nothing beyond an end. An attempt may begin
    where the tokens of those before it end; what comes twice, gateways drop."""
    said: dict[str, int] = {}  # by request, whatever the attempt
    ended: dict[tuple[str, int], int] = {}
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
            if first > said.get(request_id, 0):
                gaps.append(name)
            if row != expected.get(request_id, [])[first:last] or text != engine.text(row):
                wrong.append(name)
            if last > ended.get((request_id, attempt), last):
                beyond.append(name)
            said[request_id] = max(said.get(request_id, 0), last)
        ended |= {(end["request_id"], end["attempt"]): end["seq"] for end in frame["ends"]}
    found = {"gaps": named(gaps), "wrong": named(wrong), "beyond_the_end": named(beyond)}
    return {"rows": rows, **found}


def check_answers(
    answers: list[Record], expected: Mapping[str, list[int]], completed: set[str], engine: Engine
) -> dict[str, Any]:
    """What clients read: the right tokens from the first on, all of them where it ended well."""
    names = ("gaps", "repeats", "wrong", "not_answered", "not_on_the_log")
    faults: dict[str, list[str]] = {name: [] for name in names}
    for each in answers:
        request_id, got = each["request_id"], each["token_ids"]
        name = f"{request_id or each['number']}: {each['ended']} after {len(got)} tokens"
        if each["ended"] not in ("whole", "hung up"):
            faults["not_answered"].append(f"{name}: {each['detail']}")
        if got and request_id not in expected:
            faults["not_on_the_log"].append(name)
            continue
        fault = difference(got, expected.get(request_id, []), is_whole=each["ended"] == "whole")
        if fault:
            faults[fault].append(name)
        elif each["text"] != engine.text(got):
            faults["wrong"].append(name)
        if each["ended"] == "whole" and request_id not in completed:
            faults["not_on_the_log"].append(f"{name}: no outcome says completed")
    return {
        "answers": len(answers),
        "ended": dict(Counter(each["ended"] for each in answers)),
        "resumes": sum(each["resumes"] for each in answers),
        "tokens": sum(len(each["token_ids"]) for each in answers),
        **{name: named(each) for name, each in faults.items()},
    }


def difference(got: list[int], right: list[int], *, is_whole: bool) -> str:
    """How what was read differs from what is right; empty where it does not."""
    at = next((n for n, (a, b) in enumerate(zip(got, right, strict=False)) if a != b), len(got))
    if at == len(got) <= len(right):
        return "gaps" if is_whole and len(got) < len(right) else ""
    rest = got[at : at + 3]
    places = [n for n in range(len(right)) if rest == right[n : n + len(rest)]]
    return "wrong" if not places else "repeats" if places[0] < at else "gaps"


def stalls(answers: Iterable[Record], blows: Iterable[Record]) -> dict[str, Any]:
    """Pauses of answers, from asking to the last event, by what explains them: the broker where it
    was away; else the first of `LATE_MS` that was hurt in the pause or shortly before."""
    dealt = sorted((each["at_ms"], kind_of(each["name"])) for each in blows if "how" in each)
    backs = sorted(each["at_ms"] for each in blows if "how" not in each)
    away = [(at, backs[bisect_left(backs, at) :]) for at, kind in dealt if kind == "broker"]
    found: dict[str, list[float]] = defaultdict(list)
    for each in answers:
        moments = [each["asked_ms"], *each["at_ms"], each["ended_ms"]]
        for begin, end in zip(moments, moments[1:], strict=False):
            if end - begin < STALL_MS:
                continue
            hurt = {of for at, of in dealt if begin - LATE_MS.get(of, 0) <= at < end}
            cause = next((kind for kind in LATE_MS if kind in hurt), "nothing")
            if any(
                at < end and begin < min(back, default=end) + BROKER_LATE_MS for at, back in away
            ):
                cause = "broker"
            found[cause].append((end - begin) / 1000)
    shares = {"p50_s": 50, "p99_s": 99, "max_s": 100}
    return {
        cause: {"stalls": len(s), **{n: s[-(-(len(s) - 1) * p // 100)] for n, p in shares.items()}}
        for cause, s in ((cause, sorted(some)) for cause, some in sorted(found.items()))
    }


def kind_of(name: str) -> str:
    """Of a process."""
    kind = name.partition("-")[0]
    return KINDS.get(kind, kind)


def named(what: Iterable[str]) -> dict[str, Any]:
    """How many, and some of them."""
    found = sorted(what)
    return {"count": len(found), "some": found[:NAMED_MAX]}


async def check(task: Mapping[str, Any], history: Sequence[Record]) -> dict[str, Any]:
    """Everything."""
    decoder, topics = Decoder(Path(task["schemas"])), {}
    # Requests last: what another tenant has still under way must be known for that tenant's.
    for name in ("tokens", "outcomes", "decode", "prefill", "requests"):
        topics[name] = await read(task["bootstrap"], task["prefix"] + name, decoder)
    tenant = task.get("tenant")
    left_out = {
        each["request_id"]
        for each in topics["requests"]
        if (tenant and each["tenant"] != tenant) or each["sampling"].get("structured") is not None
    }
    for name in ("requests", "prefill", "decode", "outcomes"):
        topics[name] = [each for each in topics[name] if each["request_id"] not in left_out]
    answers = [each for each in history if each["what"] == "answer"]
    engine = Engine(task["engine"]["block_size"], task["engine"]["vocabulary"])
    requests = {each["request_id"]: each for each in topics["requests"]}
    expected, odd = expected_of(requests, topics["prefill"] + topics["decode"], engine)
    outcomes = check_outcomes(requests, topics["outcomes"], expected)
    return {
        "clients": check_answers(answers, expected, outcomes.pop("completed"), engine),
        "outcomes": outcomes,
        "frames": check_frames(topics["tokens"], expected, engine, left_out),
        "orders": named(odd),
        "stalls": stalls(answers, [each for each in history if each["what"] != "answer"]),
    }


if __name__ == "__main__":
    told = json.loads(Path(sys.argv[1]).read_text())
    lines = map(json.loads, Path(told["history"]).read_text().splitlines())
    print(json.dumps(asyncio.run(check(told, list(lines)))))
