"""How aiokafka clients connect: their options, their start, and words for where none answers."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import BrokerResponseError, KafkaConnectionError, KafkaError

from schemas.errors import BrokerUnavailable
from schemas.settings import LogSettings


def client_options(settings: LogSettings) -> dict[str, Any]:
    """Connection and security options of any aiokafka client."""
    options: dict[str, Any] = {
        "bootstrap_servers": settings.bootstrap,
        "security_protocol": settings.security_protocol,
        "request_timeout_ms": settings.request_timeout_ms,
        "metadata_max_age_ms": 30_000,
        "retry_backoff_ms": 50,
    }
    if settings.security_protocol.endswith("SSL"):
        options["ssl_context"] = ssl.create_default_context(cafile=settings.tls_ca_file or None)
    if settings.security_protocol.startswith("SASL"):
        options["sasl_mechanism"] = settings.sasl_mechanism
        options["sasl_plain_username"] = settings.sasl_username
        options["sasl_plain_password"] = settings.sasl_password
    return options


async def started(
    start: Callable[[], Awaitable[object]], stop: Callable[[], Awaitable[object]]
) -> None:
    """Start an aiokafka client, or stop it again where that fails or is cancelled.

    A start that is cancelled forgets its first connection (aiokafka 0.14), so it is waited for:
    about as long as a request may take.
    """
    starting = asyncio.ensure_future(start())
    with heeding():
        try:
            await asyncio.shield(starting)
        except BaseException:
            await asyncio.wait([starting])
            if not starting.cancelled():
                starting.exception()  # that it failed as well is of no interest any more
            await stop()
            raise


@contextmanager
def heeding() -> Iterator[None]:
    """At the end, raise a cancellation that came meanwhile and was lost.

    aiokafka 0.14 closes by waiting for tasks of its own, which end quietly when they are cancelled:
    as they do when whoever waits for them is.
    """
    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    asked = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > asked:
            raise asyncio.CancelledError


async def stopped(consumer: AIOKafkaConsumer, within_s: float) -> None:
    """Stop an aiokafka consumer; positions that no broker takes in time are not committed.

    aiokafka 0.14 would offer them for ever. And a fetch that waits to try again, because its
    broker is away, passes its own cancellation on to whoever closes the consumer, and then the
    connections stay.
    """
    with heeding():
        try:
            async with asyncio.timeout(within_s):
                await consumer.stop()
        except (asyncio.CancelledError, TimeoutError):  # then for what `stop` did not come to
            with suppress(asyncio.CancelledError):
                await consumer._fetcher.close()  # noqa: SLF001
            await consumer._client.close()  # noqa: SLF001


@asynccontextmanager
async def asking_client(
    settings: LogSettings, group_id: str | None = None, *, decided: bool = False
) -> AsyncIterator[AIOKafkaConsumer]:
    """A consumer that fetches nothing: on a connection with a fetch under way every question would
    wait for that fetch. With a group it commits what it is told to, and nothing by itself.
    With `decided` a partition ends before the first transaction that is under way."""
    consumer = AIOKafkaConsumer(
        **client_options(settings),
        group_id=group_id,
        enable_auto_commit=False,
        isolation_level="read_committed" if decided else "read_uncommitted",
    )
    await started(consumer.start, consumer.stop)
    try:
        yield consumer
    finally:
        await stopped(consumer, settings.request_timeout_ms / 1000)


def no_broker(bootstrap: str, error: KafkaError) -> BrokerUnavailable:
    """What a client raises that could not start; aiokafka's own words name its addresses only."""
    silent = isinstance(error, KafkaConnectionError)
    why = "nobody answers there as Kafka does" if silent else error
    return BrokerUnavailable(
        f"no broker at {bootstrap}: {why}; start one with `trivium broker start` or "
        "`trivium up`, or name another with --bootstrap"
    )


def is_away(error: BaseException | None) -> bool:
    """Whether a failed send says that no broker answers; else one did, and refused this record."""
    if isinstance(error, BrokerUnavailable) and error.__cause__ is not None:
        error = error.__cause__
    refused = isinstance(error, BrokerResponseError) and not error.retriable
    return not (refused or isinstance(error, AssertionError))  # an unknown partition
