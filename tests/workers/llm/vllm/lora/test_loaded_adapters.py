"""What is known of vLLM's loaded adapters, and how a load that fails is told."""

import asyncio
from types import SimpleNamespace

import pytest

from schemas.errors import ConfigError, EngineFailed
from workers.llm.vllm.lora.loaded_adapters import LoadedAdapters


class OtherEngine:
    """The calls into vLLM about adapters; it keeps the last two."""

    def __init__(self) -> None:
        self.loaded_numbers: list[int] = []
        self.calls: list[int] = []
        self.broken = 0

    async def add_lora(self, request: SimpleNamespace) -> bool:
        number = request.lora_int_id
        self.calls.append(number)
        await asyncio.sleep(0)
        if number == self.broken:
            raise RuntimeError("rank 64 is too large")
        self.loaded_numbers = [*(n for n in self.loaded_numbers if n != number), number][-2:]
        return True

    async def list_loras(self) -> list[int]:
        return self.loaded_numbers


def adapters() -> tuple[OtherEngine, LoadedAdapters]:
    requests = {name: SimpleNamespace(lora_int_id=n) for n, name in enumerate("abc", 1)}
    engine = OtherEngine()
    return engine, LoadedAdapters(engine, requests)


async def test_each_adapter_is_loaded_once_at_start() -> None:
    engine, loaded_adapters = adapters()
    await loaded_adapters.load_all()
    assert engine.calls == [1, 2, 3]
    assert loaded_adapters.names == ("b", "c")


async def test_only_adapters_that_are_not_loaded_are_loaded() -> None:
    engine, loaded_adapters = adapters()
    await loaded_adapters.load_all()
    assert await loaded_adapters.request_for("") is None
    assert (await loaded_adapters.request_for("b")).lora_int_id == 2
    assert engine.calls == [1, 2, 3]
    await asyncio.gather(*(loaded_adapters.request_for("a") for _ in range(3)))
    assert engine.calls == [1, 2, 3, 1], "those who came later waited for the first load"
    assert loaded_adapters.names == ("a", "c")


async def test_broken_adapter_is_named_at_start() -> None:
    engine, loaded_adapters = adapters()
    engine.broken = 2
    with pytest.raises(ConfigError, match=r"model\.adapters\.b: .* rank 64 is too large"):
        await loaded_adapters.load_all()


async def test_failed_load_fails_its_request() -> None:
    engine, loaded_adapters = adapters()
    await loaded_adapters.load_all()
    engine.broken = 1
    with pytest.raises(EngineFailed, match="adapter a was not loaded: rank 64"):
        await loaded_adapters.request_for("a")
    assert loaded_adapters.names == ("b", "c")
    assert await loaded_adapters.request_for("c") is not None
