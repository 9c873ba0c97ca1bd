"""How long closing takes where the log is away."""

import asyncio
from typing import Any

from schemas.log.clients import AssignedReader
from schemas.settings import LogSettings
from tests.virtual import virtual


class Away:
    """A consumer whose last positions nobody takes: aiokafka offers them for ever."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        self._fetcher = self._client = self

    async def stop(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.closed.append("closed")


@virtual
async def test_a_reader_closes_soon_however_long_requests_may_take() -> None:
    """With 30 s for a request, workers were away for 30 s after a leader change: each waited for
    its last positions before it joined again (issue 14, 5)."""
    settings = LogSettings(request_timeout_ms=30_000)
    reader = AssignedReader(settings, "decode", [0], client_id="r", committed_group="decode")
    away: Any = Away()
    reader._consumer = away
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await reader.stop()
    assert loop.time() - began_s <= 2.5
    assert away.closed == ["closed", "closed"]
