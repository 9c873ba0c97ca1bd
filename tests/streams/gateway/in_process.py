"""A gateway without a broker: its log records what is sent and delivers what a test pushes."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from schemas.codec import Codec
from schemas.errors import TriviumError
from schemas.log.clients import Headers
from schemas.records import (
    Cancellation,
    Mode,
    OutcomeKind,
    Request,
    Resumption,
    StreamEnd,
    StreamLogprobs,
    TokenFrame,
    WireError,
)
from schemas.rules.sizes import check_size
from schemas.settings import LogSettings
from streams.gateway.app import create_app, listen, make_server
from streams.gateway.config import GatewaySettings
from streams.gateway.log.backend import LogBackend, Told
from streams.gateway.metrics import Metrics
from streams.gateway.request.conversation import Turn
from streams.gateway.request.intake import Served
from streams.gateway.request.tokenizer import Tokenizer
from streams.gateway.state import Gateway
from streams.gateway.stream.hub import Hub
from tests.waiting import until

MODEL = "test-model"
STARTED_MS = 1_700_000_000_000
EVENT_KEY = "of-all-gateways-in-these-tests-01"
CODEC = Codec()
TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]


@cache
def tokenizer_folder() -> Path:
    """A folder with a small byte-level tokenizer and a chat template."""
    folder = Path(mkdtemp(prefix="trivium-tokenizer-"))
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator(["hello world, how do you do"], trainer)
    raw.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"vocab_size": 300}')
    return folder


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(tokenizer_folder())


def log_backend() -> LogBackend:
    """The product's backend, which no broker is asked for."""
    return LogBackend(
        LogSettings(),
        GatewaySettings(),
        gateway_id="gateway-a",
        started_ms=1,
        url="",
        models=frozenset({"tiny"}),
        hub=Hub(),
        metrics=Metrics(),
        codec=CODEC,
    )


class FakeLog:
    """The backend of a test. Every frame that is pushed also stays on its partition."""

    trouble: TriviumError | None = None  # raised instead of accepting anything

    def __init__(self, hub: Hub, partition: int = 3) -> None:
        self.hub = hub
        self.partition = partition
        self.frames: list[TokenFrame] = []
        self.sent: list[Told] = []
        self.headers: list[Headers] = []
        self.told: list[Turn] = []
        self.reasons: list[str] = []
        self.hold_acks: asyncio.Event | None = None
        self.news = asyncio.Condition()
        self.on_request: Callable[[Request], None] | None = None

    def place(self) -> tuple[int, int]:
        if self.trouble is not None:
            raise self.trouble
        return self.partition, len(self.frames)

    async def send(self, record: Told, headers: Headers = ()) -> None:
        check_size(record, len(CODEC.encode(record)))
        if self.hold_acks is not None:
            await self.hold_acks.wait()
        if self.trouble is not None:
            raise self.trouble
        async with self.news:
            self.sent.append(record)
            self.headers.append(headers)
            self.news.notify_all()
        if isinstance(record, Request) and self.on_request is not None:
            self.on_request(record)

    def tell(self, turn: Turn) -> None:
        self.told.append(turn)

    def problems(self) -> list[str]:
        return self.reasons

    async def follow(self, partition: int, offset: int) -> AsyncIterator[TokenFrame]:
        for at in itertools.count(offset):
            async with self.news:
                while len(self.frames) <= at:
                    await self.news.wait()
            yield self.frames[at]

    async def push(self, *frames: TokenFrame) -> None:
        """Frames arrive, together."""
        async with self.news:
            self.frames += frames
            self.news.notify_all()
        for one in frames:
            self.hub.apply(one, asyncio.get_running_loop().time())

    async def wait_sent(self, count: int) -> None:
        """Until this many records were sent."""
        async with self.news:
            await self.news.wait_for(lambda: len(self.sent) >= count)

    @property
    def requests(self) -> list[Request]:
        return [record for record in self.sent if isinstance(record, Request)]

    @property
    def cancellations(self) -> list[Cancellation]:
        return [record for record in self.sent if isinstance(record, Cancellation)]

    @property
    def resumptions(self) -> list[Resumption]:
        return [record for record in self.sent if isinstance(record, Resumption)]


class Rig:
    """One gateway in this process."""

    def __init__(self, *, max_model_len: int = 512, partition: int = 3, **settings: Any) -> None:
        metrics = Metrics()
        hub = Hub(metrics)
        self.log = FakeLog(hub, partition)
        served = Served(
            name=MODEL, tokenizer=tokenizer(), max_model_len=max_model_len, created_s=1_700_000_000
        )
        settings = {"event_key": EVENT_KEY, **settings}
        self.gateway = Gateway(
            *(GatewaySettings(**settings), served, self.log, hub, metrics),
            gateway_id="gateway-1",
            started_ms=STARTED_MS,
        )
        self.app = create_app(self.gateway)

    def client(self) -> httpx.AsyncClient:
        """Calls the app without a socket; responses arrive whole."""
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://gateway")

    def answer_with(self, *texts: str, **end: Any) -> None:
        """Answer every request at once, one token per text."""

        def answer(request: Request) -> None:
            self.log.hub.apply(
                frame(request.request_id, list(texts), end=ended(request.request_id, texts, **end)),
                asyncio.get_running_loop().time(),
            )

        self.log.on_request = answer


def http_client(url: str) -> httpx.AsyncClient:
    """A client that waits long, and keeps no connection that the server may be about to close."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, timeout=100, limits=limits)


@contextlib.asynccontextmanager
async def serving(rig: Rig) -> AsyncIterator[str]:
    """The app on a real socket; gives its URL, once it listens."""
    sock = listen("127.0.0.1", 0)
    server = make_server(rig.app, rig.gateway.settings)
    task = asyncio.get_running_loop().create_task(server.serve(sockets=[sock]))
    try:
        await until(lambda: server.started)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        sock.close()


def frame(
    request_id: str,
    texts: list[str],
    *,
    attempt: int = 1,
    first_seq: int = 0,
    first_char: int = 0,
    end: StreamEnd | None = None,
    logprobs: list[StreamLogprobs] | None = None,
) -> TokenFrame:
    """One row of one stream, one token per text."""
    return TokenFrame(
        worker_id="decode-1",
        at_ms=0,
        request_ids=[request_id] if texts else [],
        attempts=[attempt] if texts else [],
        first_seqs=[first_seq] if texts else [],
        first_chars=[first_char] if texts else [],
        token_counts=[len(texts)] if texts else [],
        token_ids=[100 + first_seq + i for i in range(len(texts))],
        texts=["".join(texts)] if texts else [],
        logprobs=logprobs or [],
        ends=[end] if end is not None else [],
    )


def ended(
    request_id: str,
    texts: Sequence[str] = (),
    *,
    attempt: int = 1,
    kind: OutcomeKind = OutcomeKind.COMPLETED,
    error: WireError | None = None,
    finish_reason: str = "stop",
    **fields: Any,
) -> StreamEnd:
    """The last word after these texts."""
    defaults: dict[str, Any] = {
        "prompt_tokens": 7,
        "cached_tokens": 4,
        "mode": Mode.REMOTE,
        "prefill_worker": "prefill-1",
        "decode_worker": "decode-1",
    }
    return StreamEnd(
        request_id=request_id,
        attempt=attempt,
        seq=len(texts),
        chars=len("".join(texts)),
        kind=kind,
        finish_reason=finish_reason,
        error=error,
        **(defaults | fields),
    )


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    """A chat body."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def events_of(text: str) -> list[Any]:
    """The data of each event; JSON where it is."""
    found = []
    for line in text.splitlines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


def text_of(events: list[Any]) -> str:
    """The answer that the chunks of a chat's first choice spell."""
    return "".join(
        choice["delta"].get("content") or ""
        for event in events
        if isinstance(event, dict)
        for choice in event.get("choices", [])
        if choice["index"] == 0
    )


def completion(prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **fields}


async def call(rig: Rig, body: Any, path: str = "/v1/chat/completions", **headers: str) -> Any:
    """Status and JSON of a call."""
    async with rig.client() as client:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await client.post(
            path,
            content=content,
            headers={
                "content-type": "application/json",
                **{k.replace("_", "-"): v for k, v in headers.items()},
            },
        )
        return response.status_code, response.json()
