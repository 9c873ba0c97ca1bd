"""Options, start and close of all aiokafka clients, and the errors if no broker answers."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import BrokerResponseError, KafkaConnectionError, KafkaError

from schemas.errors import BrokerUnavailable
from schemas.settings import LogSettings
from streams.log.cancellation import LEAVE_S, cancel_and_wait, run_within, wait_uncancelled

START_S = 15.0
Close = Callable[[], Coroutine[Any, Any, object]]
_END_S = 1.5  # for tasks that are cancelled twice; less than `CLOSE_S`
_TASKS_OF_A_GROUP = ("_coordination_task", "_heartbeat_task", "_commit_refresh_task")
CLOSE_S = 2.0  # for a client to close; last positions, only for lag tools, may be lost


def client_options(settings: LogSettings) -> dict[str, Any]:
    """Return the connection and security options of any aiokafka client."""
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
    """Start an aiokafka client; stop it again if the start fails or is cancelled.

    A cancelled start leaks its first connection (aiokafka 0.14), so this waits for the start first:
    about as long as a request may take.
    """
    starting = asyncio.ensure_future(start())
    try:
        await asyncio.shield(starting)
    except BaseException as error:
        _, is_over = await wait_uncancelled(
            {starting}, START_S
        )  # a producer may request its id for ever
        raised = [error, asyncio.CancelledError()] if is_over else [error]
        await _close_within(2 * LEAVE_S, lambda: cancel_and_wait(starting), raised)
        await _close_within(CLOSE_S, stop, raised)
        _raise_first(raised)


async def stop_consumer(consumer: AIOKafkaConsumer, within_s: float = CLOSE_S) -> None:
    """Stop an aiokafka consumer within `within_s`, so that a member can rejoin as soon as the log
    is back. A member of a group takes longer, because it leaves the group.

    aiokafka 0.14 would retry to commit its last positions for ever if no broker accepts them. And
    a fetch that waits for a retry, because its broker is unreachable, raises its own cancellation
    in the caller of `stop`. Then this closes the rest, or its connections would leak.
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
    """Flush and close an aiokafka producer; drop what no broker accepts within `within_s`. An
    idempotent one would retry its records for ever."""
    parts = (producer._sender.close, producer.client.close)  # noqa: SLF001  # there is no other way
    await _close_parts(parts, producer.stop, within_s)


async def abort_producer(producer: AIOKafkaProducer) -> None:
    """Close an aiokafka producer without its buffered records: its connections first."""
    await _close_parts((producer.client.close, producer._sender.close))  # noqa: SLF001  # no way


async def _close_parts(
    parts: Iterable[Close], whole: Close | None = None, within_s: float = 0
) -> None:
    """Close a client, or its parts if that fails or takes too long: each in bounded time, even if
    others raise.

    Raises CancelledError, or else BrokerUnavailable, KafkaError or OSError. Other errors of the
    client's own tasks become one of these: uvloop raises RuntimeError for a write after the end of
    a connection.
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
    """Raise a cancellation, or else the first error, if there was one."""
    for error in sorted(raised, key=lambda error: not isinstance(error, asyncio.CancelledError)):
        raise error


async def _close_within(seconds: float, close: Close, raised: list[BaseException]) -> bool:
    """Close in at most `seconds`; return whether that ended without an error."""
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
    """Yield a consumer that fetches nothing: on a connection with an active fetch every request
    would wait for that fetch. With a group, it commits only on demand. With `committed_only` a
    partition ends before its first open transaction. It requests the metadata of `topics` (full
    names) at once; for others aiokafka requests it one by one, with a pause after each."""
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
    """Return the error of a client that could not start; aiokafka's message has only addresses."""
    silent = isinstance(error, KafkaConnectionError)
    why = "nobody answers there as Kafka does" if silent else error
    return BrokerUnavailable(
        f"no broker at {bootstrap}: {why}; start one with `trivium broker start` or "
        "`trivium up`, or name another with --bootstrap"
    )


def is_unreachable(error: BaseException | None) -> bool:
    """Return whether a send failed because no broker answers; else one has refused the record."""
    if isinstance(error, BrokerUnavailable) and error.__cause__ is not None:
        error = error.__cause__
    refused = isinstance(error, BrokerResponseError) and not error.retriable
    return not (refused or isinstance(error, AssertionError))  # an unknown partition
