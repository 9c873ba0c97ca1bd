"""The loads of the platform benchmark: prompts on a topic, calls over HTTP, a batch, and chats.

Senders of prompts on a topic need not retry. Callers over HTTP try the gateways in turn until one
answers. `TopicLoad` and `HttpLoad` write a note for each acknowledged prompt and each answer;
`checker.py` checks from them that each has its answer.
"""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from infra.bench.platform.questions import LoadQuestion, draw_questions
from schemas.codec import Codec
from schemas.errors import NotReady
from schemas.settings import LogSettings
from streams.log.cancellation import cancel_and_wait
from streams.log.connecting import client_options, stop_consumer

_PATH, _PUBLIC_PREFIX = "/v1/chat/completions", "chatcmpl-"
_PAUSE_S, _PAUSE_MAX_S, _PATIENCE_S = 0.5, 2.0, 600.0  # pauses double, as in the client `openai`
_TRY = aiohttp.ClientTimeout(total=120, connect=5)
_TRY_FILE = aiohttp.ClientTimeout(total=300, connect=5)
_REFUSALS = [f"status {code}" for code in (400, 401, 413, 422)]  # which no other try changes
_PRIORITY = {"x-priority": "batch"}  # the class of prompts
_PROBE_TOKENS, _PROBE_PAUSE_S, _PROBE_PATIENCE_S = 4, 0.25, 60.0
_AT_ONCE = 2_000  # prompts sent and not acknowledged
_ACK_MS = 180_000  # the run fails if the broker does not acknowledge a prompt in this time
_OFFSET = "trivium-prompt-offset"
_LOOK_S, _BATCH_S = 1.0, 3_600.0
_ENDED = ("completed", "failed", "expired", "cancelled")
OnProgress = Callable[[int], None]
Arguments = Callable[[], dict[str, Any]]  # of one try


class GatewayCalls:
    """Calls gateways in turn until one answers."""

    def __init__(self, urls: Sequence[str], session: aiohttp.ClientSession) -> None:
        self._urls, self._session = urls, session
        self.tries: Counter[str] = Counter()  # failed tries, by reason

    async def call(self, method: str, path: str, make: Arguments = dict, at: int = 0) -> bytes:
        """Return the body of the first whole answer, from gateway `at` on. `make` returns the
        arguments of a try. Raises NotReady if no gateway answers or one refuses."""
        end_s, pause_s, why, text = time.monotonic() + _PATIENCE_S, _PAUSE_S, "", ""
        while time.monotonic() < end_s and why not in _REFUSALS:
            url = self._urls[at % len(self._urls)] + path
            try:
                async with self._session.request(method, url, **make()) as response:
                    if response.status == 200:
                        return await response.read()
                    why, text = f"status {response.status}", await response.text()
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                why, text = type(error).__name__, str(error)
            self.tries[why] += 1
            at += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
        raise NotReady(f"{method} {path}: no answer: {why}: {text[:300]}")


class TimedLoad:
    """One load, with its times and its progress."""

    began_s = sent_s = ended_s = 0.0
    answers = 0


class HttpLoad(TimedLoad):
    """Sends one set of questions over HTTP from a number of clients."""

    def __init__(self, urls: Sequence[str], model: str, clients: int, notes: Path) -> None:
        self._urls, self._model, self._clients, self._notes = urls, model, clients, notes
        self.tries: Counter[str] = Counter()

    async def run(self, questions: Iterable[LoadQuestion], on_progress: OnProgress) -> None:
        """Send all questions and wait until each has its answer; raises NotReady."""
        pending_questions = iter(questions)
        self.began_s = time.monotonic()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=_TRY, connector=connector) as session:
            gateways = GatewayCalls(self._urls, session)
            self.tries = gateways.tries
            with self._notes.open("a") as notes:

                async def client(number: int) -> None:
                    for question in pending_questions:
                        body = question.body(self._model)
                        make: Arguments = partial(dict, json=body, headers=_PRIORITY)
                        answer = json.loads(await gateways.call("POST", _PATH, make, number))
                        notes.write(json.dumps(_note(question, answer)) + "\n")
                        self.answers += 1
                        on_progress(self.answers)

                async with asyncio.TaskGroup() as group:
                    for number in range(self._clients):
                        group.create_task(client(number))
        self.ended_s = time.monotonic()


def _note(question: LoadQuestion, answer: dict[str, Any]) -> dict[str, object]:
    return {
        "number": question.number,
        "request_id": answer["id"].removeprefix(_PUBLIC_PREFIX),
        **{name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")},
    }


class TtftProbes:
    """Sends interactive chats at a rate, without waiting for earlier ones, and measures ms from
    each call to its first token."""

    def __init__(self, urls: Sequence[str], model: str, rate: float, seed: int) -> None:
        self._urls, self._model, self._rate, self._seed = urls, model, rate, seed
        self.ttft_ms: list[float] = []
        self.failed = 0

    async def run(self) -> None:
        """Send chats until cancelled. Chats that are unfinished then do not count."""
        rng = random.Random(f"probes {self._seed}")
        due_s, arrivals = time.monotonic(), draw_questions(1 << 30, self._seed + 77)
        async with aiohttp.ClientSession(timeout=_TRY) as session, asyncio.TaskGroup() as group:
            for number, question in enumerate(arrivals, 1):
                due_s += rng.expovariate(self._rate)
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                group.create_task(self._chat(session, question, number))

    async def _chat(self, session: aiohttp.ClientSession, question: LoadQuestion, at: int) -> None:
        """Try the gateways in turn until one streams a token; the time includes failed tries."""
        content = {"messages": [{"role": "user", "content": question.text}]}
        body = {"model": self._model, **content, "max_tokens": _PROBE_TOKENS, "stream": True}
        began_s = time.monotonic()
        while (passed_s := time.monotonic() - began_s) < _PROBE_PATIENCE_S:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                url = self._urls[at % len(self._urls)]
                async with session.post(url + _PATH, json=body) as response:
                    async for line in response.content:
                        if b'"content":' in line and b'"content": ""' not in line:
                            self.ttft_ms.append(1e3 * (time.monotonic() - began_s))
                            return
            at += 1
            await asyncio.sleep(min(_PROBE_PAUSE_S, passed_s))  # the first retry is immediate
        self.failed += 1


class BatchLoad(TimedLoad):
    """Runs one batch. The bridges answer its lines as they answer prompts (topics `batch.prompts`,
    `batch.answers`). `files` has the paths of its files `input`, `output` and `errors`."""

    def __init__(self, urls: Sequence[str], model: str, folder: Path) -> None:
        self._urls, self._model = urls, model
        self.files = {
            name: str(folder / f"batch-{name}.jsonl") for name in ("input", "output", "errors")
        }
        self.status: dict[str, Any] = {}

    async def create(self, questions: Iterable[LoadQuestion]) -> None:
        """Upload the input file and create the batch; raises NotReady."""
        lines = "".join(json.dumps(question.line(self._model)) + "\n" for question in questions)
        await asyncio.to_thread(Path(self.files["input"]).write_text, lines)

        def form() -> dict[str, Any]:
            data = aiohttp.FormData({"purpose": "batch"})
            data.add_field("file", lines.encode(), filename="batch.jsonl")
            return {"data": data}

        file_id = json.loads(await self._call("POST", "/v1/files", form))["id"]
        body = {"input_file_id": file_id, "endpoint": _PATH, "completion_window": "24h"}
        self.began_s = time.monotonic()
        make: Arguments = partial(dict, json=body)
        self.status = json.loads(await self._call("POST", "/v1/batches", make))

    async def wait(self, on_progress: OnProgress) -> None:
        """Wait until the batch has ended, then write its results to files; raises NotReady."""
        end_s, path = time.monotonic() + _BATCH_S, f"/v1/batches/{self.status['id']}"
        while self.status["status"] not in _ENDED:
            if time.monotonic() > end_s:
                raise NotReady(f"the batch has not ended in {_BATCH_S} s: {self.status}")
            await asyncio.sleep(_LOOK_S)
            self.status = json.loads(await self._call("GET", path))
            counts = self.status.get("request_counts") or {}
            self.answers = counts.get("completed", 0) + counts.get("failed", 0)
            on_progress(self.answers)
        self.ended_s = time.monotonic()
        for name, field in (("output", "output_file_id"), ("errors", "error_file_id")):
            file_id = self.status.get(field)
            content = await self._call("GET", f"/v1/files/{file_id}/content") if file_id else b""
            await asyncio.to_thread(Path(self.files[name]).write_bytes, content)

    async def _call(self, method: str, path: str, make: Arguments = dict) -> bytes:
        async with aiohttp.ClientSession(timeout=_TRY_FILE) as session:
            return await GatewayCalls(self._urls, session).call(method, path, make)


class TopicLoad(TimedLoad):
    """Sends prompts to their topic as fast as the broker accepts them, and counts the answers."""

    def __init__(self, log: LogSettings, notes: Path) -> None:
        self._log, self._notes = log, notes
        self._answered: set[tuple[int, bytes]] = set()  # partition and offset of prompts

    async def run(
        self, questions: Iterable[LoadQuestion], count: int, codec: Codec, on_progress: OnProgress
    ) -> None:
        """Send all questions and return when `count` prompts have answers."""
        answers = await self._follow()
        self.began_s = time.monotonic()
        sending = asyncio.create_task(self._send(questions, codec))
        try:
            while self.answers < count:
                if sending.done():
                    sending.result()
                for got in (await answers.getmany(timeout_ms=250)).values():
                    for record in got:
                        offset = dict(record.headers).get(_OFFSET, b"")
                        self._answered.add((record.partition, offset))
                self.answers = len(self._answered)
                on_progress(self.answers)
            self.ended_s = time.monotonic()
        finally:
            await cancel_and_wait(sending)
            await stop_consumer(answers)  # the broker may be down

    async def _follow(self) -> AIOKafkaConsumer:
        """Return a consumer at the end of the topic of answers."""
        consumer = AIOKafkaConsumer(
            **client_options(self._log),
            isolation_level="read_committed",
            enable_auto_commit=False,
            client_id="bench-answers",
        )
        await consumer.start()
        topic = f"{self._log.topic_prefix}answers"
        places = [TopicPartition(topic, n) for n in range(self._log.prompt_partitions)]
        consumer.assign(places)
        await consumer.seek_to_end(*places)
        return consumer

    async def _send(self, questions: Iterable[LoadQuestion], codec: Codec) -> None:
        producer = AIOKafkaProducer(
            **client_options(self._log) | {"request_timeout_ms": _ACK_MS},
            client_id="bench-prompts",
            enable_idempotence=True,
            linger_ms=5,
        )
        await producer.start()
        slots, topic = asyncio.Semaphore(_AT_ONCE), f"{self._log.topic_prefix}prompts"
        try:
            with self._notes.open("a") as notes:

                async def send(question: LoadQuestion) -> None:
                    key, value = question.key.encode(), question.prompt(codec)
                    ack = await producer.send(topic, value, key=key)
                    at = await ack
                    slots.release()
                    note = {"p": at.partition, "o": at.offset, "number": question.number}
                    notes.write(json.dumps(note) + "\n")

                async with asyncio.TaskGroup() as group:
                    for question in questions:
                        await slots.acquire()
                        group.create_task(send(question))
        finally:
            await producer.stop()
        self.sent_s = time.monotonic()
