"""How aiokafka clients connect: their options, their start, and words for where none answers."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import BrokerResponseError, KafkaConnectionError, KafkaError

from schemas.errors import BrokerUnavailable
from schemas.log.cancellation import LEAVE_S, cancel_and_wait, run_within, wait_uncancelled
from schemas.settings import LogSettings

START_S = 15.0
Close = Callable[[], Coroutine[Any, Any, object]]
_END_S = 1.5  # for tasks that are cancelled twice; less than closing may take
_TASKS_OF_A_GROUP = ("_coordination_task", "_heartbeat_task", "_commit_refresh_task")
CLOSE_S = 2.0  # for a client to close; last positions, which only lag tools read, may be lost


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


async def start_client(start: Callable[[], Awaitable[object]], stop: Close) -> None:
    """Start an aiokafka client, or stop it again where that fails or is cancelled.

    A start that is cancelled forgets its first connection (aiokafka 0.14), so it is waited for
    first: about as long as a request may take.
    """
    starting = asyncio.ensure_future(start())
    try:
        await asyncio.shield(starting)
    except BaseException as error:
        _, is_over = await wait_uncancelled(
            {starting}, START_S
        )  # a producer may ask for its id for ever
        raised = [error, asyncio.CancelledError()] if is_over else [error]
        await _close_within(2 * LEAVE_S, lambda: cancel_and_wait(starting), raised)
        await _close_within(CLOSE_S, stop, raised)
        _raise_first(raised)


async def stop_consumer(consumer: AIOKafkaConsumer, within_s: float = CLOSE_S) -> None:
    """Stop an aiokafka consumer soon: whoever closes because the log was away is to join again as
    soon as it is back. A member of a group takes longer, which it leaves.

    aiokafka 0.14 would offer its last positions for ever, where no broker takes them. And a fetch
    that waits to try again, because its broker is away, passes its own cancellation on to whoever
    closes the consumer. Then what is left is closed here, or its connections would stay.
    """

    async def leave_group() -> None:
        group = consumer._coordinator  # noqa: SLF001  # there is no other way
        tasks = (getattr(group, name, None) for name in _TASKS_OF_A_GROUP)
        await cancel_and_wait(*(task for task in tasks if task is not None), within_s=_END_S)

    parts = (
        leave_group,
        lambda: consumer._fetcher.close(),  # noqa: SLF001
        lambda: consumer._client.close(),  # noqa: SLF001
    )
    await _close_parts(parts, consumer.stop, within_s)


async def close_producer(producer: AIOKafkaProducer, within_s: float) -> None:
    """Flush and close an aiokafka producer; what no broker takes in so long is given up. An
    idempotent one would offer its records for ever."""
    parts = (producer._sender.close, producer.client.close)  # noqa: SLF001  # as above
    await _close_parts(parts, producer.stop, within_s)


async def abort_producer(producer: AIOKafkaProducer) -> None:
    """Close an aiokafka producer without what it still holds: its connections first."""
    await _close_parts((producer.client.close, producer._sender.close))  # noqa: SLF001  # as above


async def _close_parts(
    parts: Iterable[Close], whole: Close | None = None, within_s: float = 0
) -> None:
    """Close a client, or part by part where that fails or takes longer: each in bounded time, and
    whatever the others raise.

    Raises CancelledError, or else BrokerUnavailable, KafkaError or OSError. Its own tasks may have
    met more than that: uvloop raises RuntimeError for a write behind the end of a connection. For
    whoever closes it, it is one trouble with the log.
    """
    raised = list[BaseException]()
    if whole is not None and await _close_within(within_s, whole, raised):
        return
    for part in parts:
        await _close_within(CLOSE_S, part, raised)
    try:
        _raise_first(raised)
    except (BrokerUnavailable, KafkaError, OSError):
        raise
    except Exception as error:
        raise BrokerUnavailable(f"a client of the log was not closed in order: {error}") from error


def _raise_first(raised: list[BaseException]) -> None:
    """A cancellation, or else the first error, if there was one."""
    for error in sorted(raised, key=lambda error: not isinstance(error, asyncio.CancelledError)):
        raise error


async def _close_within(seconds: float, close: Close, raised: list[BaseException]) -> bool:
    """Whether it was closed in so long, and raised nothing."""
    try:
        return await run_within(seconds, close())
    except (Exception, asyncio.CancelledError) as error:
        raised.append(error)
        return False


@asynccontextmanager
async def query_client(
    settings: LogSettings,
    group_id: str | None = None,
    *,
    committed_only: bool = False,
    topics: Collection[str] = (),
) -> AsyncIterator[AIOKafkaConsumer]:
    """A consumer that fetches nothing: on a connection with a fetch under way every question would
    wait for that fetch. With a group it commits what it is told to, and nothing by itself.
    With `committed_only` a partition ends before the first transaction that is under way. It asks
    at once where these `topics` are, by full name; of others aiokafka finds out one after the
    other, with a pause behind each."""
    consumer = AIOKafkaConsumer(
        **client_options(settings),
        group_id=group_id,
        enable_auto_commit=False,
        isolation_level="read_committed" if committed_only else "read_uncommitted",
    )
    await start_client(consumer.start, consumer.stop)
    try:
        if topics:
            await consumer._client.set_topics(topics)  # noqa: SLF001  # there is no other way
        yield consumer
    finally:
        await stop_consumer(consumer)


def no_broker(bootstrap: str, error: KafkaError) -> BrokerUnavailable:
    """What a client raises that could not start; aiokafka's own words name its addresses only."""
    silent = isinstance(error, KafkaConnectionError)
    why = "nobody answers there as Kafka does" if silent else error
    return BrokerUnavailable(
        f"no broker at {bootstrap}: {why}; start one with `trivium broker start` or "
        "`trivium up`, or name another with --bootstrap"
    )


def is_unreachable(error: BaseException | None) -> bool:
    """Whether a failed send says that no broker answers; else one did, and refused this record."""
    if isinstance(error, BrokerUnavailable) and error.__cause__ is not None:
        error = error.__cause__
    refused = isinstance(error, BrokerResponseError) and not error.retriable
    return not (refused or isinstance(error, AssertionError))  # an unknown partition
