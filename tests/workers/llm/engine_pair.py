"""Two engines that hand over to each other, and the loop that they live in, for tests."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self

from tests.waits import PATIENCE_S
from tests.workers.llm.engines import Answer, answered, job, start_vllm
from tests.workers.llm.engines import prompt as make_prompt

Start = Callable[[], Awaitable[Any]]
_FAULTY = json.dumps({"worker_extension_cls": "tests.workers.llm.vllm.faulty_kv.FaultyKv"})
PUSH_MARGIN_MS = 500  # short, so that giving up is quick


@dataclass
class EnginePair:
    """Engines of one kind. Their tests are plain functions, which `run` what they await."""

    runner: asyncio.Runner
    producer: Any
    consumer: Any

    @classmethod
    def started(cls, start: Start) -> Self:
        """Both at once."""

        async def both() -> tuple[Any, Any]:
            return await asyncio.gather(start(), start())

        runner = asyncio.Runner()
        try:
            return cls(runner, *runner.run(both()))
        except BaseException:
            runner.close()
            raise

    def run(self, main: Any) -> Any:
        async def limited() -> Any:
            async with asyncio.timeout(PATIENCE_S):
                return await main

        return self.runner.run(limited())

    def close(self) -> None:
        """The consumer first, as it may still read from the other."""
        for engine in (self.consumer, self.producer):
            self.runner.run(engine.close())
        self.runner.close()


class Pair(EnginePair):
    """Answers of one of the two."""

    def answer(self, **fields: Any) -> Answer:
        """An answer of the consumer to a prompt that is always the same."""
        tokens = fields.pop("prompt_tokens", make_prompt(40))
        answer: Answer = self.run(answered(self.consumer, job(tokens, **fields)))
        return answer


async def _start_pulling() -> Any:
    engine: Any = await start_vllm(keep_decoded_kv_ms=60_000, extra=_FAULTY)
    engine._receiver._keeps = False  # but in the tests that are about it
    return engine


async def _start_pushing() -> Any:
    return await start_vllm(kv_transfer="push", handle_margin_ms=PUSH_MARGIN_MS, extra=_FAULTY)


class VllmPair:
    """vLLM engines: started for whoever needs them first, as a start takes long."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._pair: EnginePair | None = None

    def get(self) -> EnginePair:
        """The engines, which know each other; new ones after `close`."""
        if self._pair is None:
            self._pair = EnginePair.started(self._start)
            pair = self._pair.producer, self._pair.consumer
            peer_metadata = {
                engine.capability.engine_id: engine.capability.nixl_metadata for engine in pair
            }
            for engine in pair:
                engine.set_peer_metadata(peer_metadata.get)
        return self._pair

    def close(self) -> None:
        """For whoever has ended them, and at the end."""
        if self._pair is not None:
            pair, self._pair = self._pair, None
            pair.close()


def pulling() -> VllmPair:
    """Decode reads."""
    return VllmPair(_start_pulling)


def pushing() -> VllmPair:
    """Prefill writes."""
    return VllmPair(_start_pushing)
