"""`trivium chat` against a gateway in this process."""

import asyncio
import json

from schemas.records import AnswerDelta, DeltaKind
from tests.infra.cli.trivium_runner import Ran, trivium_here
from tests.streams.gateway.in_process import InProcessGateway, serving
from tests.streams.gateway.samples import MODEL


async def chatting(gateway: InProcessGateway, *words: str) -> Ran:
    async with serving(gateway) as url:
        return await asyncio.to_thread(trivium_here, "chat", "--url", url, "-m", "hello", *words)


async def test_chat_probes_search_collection() -> None:
    gateway = InProcessGateway(max_model_len=4_000)
    gateway.answer_with("a", probes=2, stalled_ms=3.0)
    code, output, errors = await chatting(gateway, "-c", "books", "--probes", "--json")
    assert code == 0, errors
    retrieval = gateway.log.requests[0].retrieval
    assert retrieval is not None and retrieval.probing is not None
    assert retrieval.collection == "books"
    turn = json.loads(output)
    assert (turn["text"], turn["probes"]) == ("a", 2)
    _, _, plain_errors = await chatting(gateway, "-c", "books", "--probes")
    assert "2 probes, for which it stood still 3 ms" in plain_errors


async def test_chat_names_the_model_that_it_is_told() -> None:
    gateway = InProcessGateway()
    gateway.answer_with("a")
    code, _, errors = await chatting(gateway, "--model", MODEL)
    assert code == 0, errors
    code, _, errors = await chatting(gateway, "--model", "other")
    assert code == 2 and "found 'other'" in errors


async def test_chat_probes_require_collection() -> None:
    code, _, errors = await chatting(InProcessGateway(), "--probes")
    assert code != 0 and "--probes: needs --collection" in errors


async def test_chat_shows_reasoning_apart_from_text() -> None:
    gateway = InProcessGateway()
    deltas = [
        AnswerDelta(seq=1, kind=DeltaKind.REASONING, text="Say it."),
        AnswerDelta(seq=1, kind=DeltaKind.CONTENT, text="a"),
    ]
    gateway.answer_with_deltas(*deltas)
    _, output, errors = await chatting(gateway)
    assert output == "a" and "Say it.\n" in errors
    _, output, _ = await chatting(gateway, "--json")
    turn = json.loads(output)
    assert (turn["text"], turn["reasoning"]) == ("a", "Say it.")
