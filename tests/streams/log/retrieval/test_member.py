"""An asker of its own: what is raised within passes, and a lost membership ends it."""

import asyncio
import functools
from typing import Any

import pytest

from schemas.codec import Codec
from schemas.errors import LeaseError
from schemas.settings import LogSettings
from streams.log.retrieval import client


async def test_client_raises_lease_error_when_membership_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lease_loss = asyncio.Event()

    class Part:
        """Stands for a client's parts: starts, stops, and runs until the lease is lost."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.member_id, self.leases = "asker", {"hits": 0}
            self.start = self.stop = self.join = self.leave = functools.partial(asyncio.sleep, 0)
            self.set_state = self.leases.get

        async def batch(self) -> list[Any]:
            return [await asyncio.Event().wait()]

        async def run(self) -> None:
            await lease_loss.wait()
            raise LeaseError("silent for too long") from ConnectionError()

    monkeypatch.setattr(client, "LogProducer", Part)
    monkeypatch.setattr(client, "Membership", Part)
    monkeypatch.setattr(client, "AssignedReader", Part)
    with pytest.raises(ZeroDivisionError):
        async with client.open_retrieval_client(LogSettings(), Codec(), "asker"):
            raise ZeroDivisionError
    with pytest.raises(LeaseError, match="silent for too long") as raised:
        async with client.open_retrieval_client(LogSettings(), Codec(), "asker"):
            lease_loss.set()
            await asyncio.Event().wait()
    assert isinstance(raised.value.__cause__, ConnectionError)


async def test_client_closes_all_parts_after_repeated_cancellation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = list[str]()

    class Part:
        """Raises CancelledError at each closing."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.member_id, self.leases = "asker", {"hits": 0}
            self.start = self.join = functools.partial(asyncio.sleep, 0)
            self.run = self.batch = asyncio.Event().wait
            self.set_state = self.leases.get
            self.stop = functools.partial(self.close, "stop")
            self.leave = functools.partial(self.close, "leave")

        async def close(self, what: str) -> None:
            closed.append(what)
            raise asyncio.CancelledError

    monkeypatch.setattr(client, "LogProducer", Part)
    monkeypatch.setattr(client, "Membership", Part)
    monkeypatch.setattr(client, "AssignedReader", Part)
    with pytest.raises(asyncio.CancelledError):
        async with client.open_retrieval_client(LogSettings(), Codec(), "asker"):
            pass
    assert closed == ["stop", "leave", "stop"]  # the reader, the membership, the producer
