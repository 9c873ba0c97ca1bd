"""The LoRA adapters of a vLLM engine: loads them, and knows which ones are loaded.

vLLM keeps a bounded number of them and drops the least recently used one. A load in the middle of a
step that fails would end the engine. So an adapter that is not loaded is loaded by a call of its
own, which only the request waits for. Used by `engine.py`; the requests are of `api.py`.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from schemas.errors import ConfigError, EngineFailed

log = logging.getLogger(__name__)


class LoadedAdapters:
    """The adapters of one engine; `requests` are vLLM's by their names."""

    def __init__(self, llm: Any, requests: Mapping[str, Any]) -> None:
        self.names: tuple[str, ...] = ()  # loaded ones
        self._llm, self._requests = llm, requests
        self._lock = asyncio.Lock()

    async def load_all(self) -> None:
        """Load each adapter once, in order. Raise ConfigError, which names a broken one."""
        for name in self._requests:
            try:
                async with self._lock:
                    await self._load(name)
            except Exception as error:
                raise ConfigError(
                    f"model.adapters.{name}: vLLM expected an adapter that it can load: {error}"
                ) from error

    async def request_for(self, name: str) -> Any:
        """Return vLLM's request for an adapter, loaded if it was not; None for no adapter.

        Raise EngineFailed if it cannot be loaded now, as when its folder is gone.
        """
        if not name:
            return None
        async with self._lock:
            if name not in self.names:
                try:
                    await self._load(name)
                except Exception as error:
                    log.warning("adapter %s: not loaded: %s", name, error)
                    raise EngineFailed(f"adapter {name} was not loaded: {error}") from error
        return self._requests[name]

    async def _load(self, name: str) -> None:
        await self._llm.add_lora(self._requests[name])
        numbers = await self._llm.list_loras()
        self.names = tuple(
            name for name, request in self._requests.items() if request.lora_int_id in numbers
        )
