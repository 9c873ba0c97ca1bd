"""The retrieval pool as a gateway's client: embedding models that the settings have."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from schemas.codec import Codec
from schemas.errors import NotReady, UnknownModel
from schemas.settings import LogSettings
from streams.calls.log.pool import LogPool
from streams.log.clock import wall_ms


async def test_model_of_settings_is_away_and_another_unknown() -> None:
    """No worker of the fleet has either."""

    async def embed(*_: Any, embedder: str, **__: Any) -> None:
        raise UnknownModel(f"model: expected one of 'mini', found {embedder!r}")

    pool = LogPool(LogSettings(), Codec(), "g-asks", 1_000, ["mini", "small"])
    pool._joined = asyncio.get_running_loop().create_future()
    pool._joined.set_result(SimpleNamespace(embed=embed))  # type: ignore[arg-type]  # a stub
    pool._member_task = asyncio.get_running_loop().create_task(asyncio.Event().wait())  # type: ignore[arg-type]
    try:
        with pytest.raises(NotReady, match="no embedding worker of small is ready"):
            await pool.embed(["a"], deadline_ms=wall_ms() + 60_000, embedder="small")
        with pytest.raises(UnknownModel, match="found 'other'"):
            await pool.embed(["a"], deadline_ms=wall_ms() + 60_000, embedder="other")
    finally:
        await pool.close()
