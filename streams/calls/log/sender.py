"""The producer of a process that sends calls: requests, cancellations, unreadable records.

Topics that the process writes otherwise use the same producer. A request is *accepted* when the
broker has acknowledged it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiokafka import ConsumerRecord
from aiokafka.errors import KafkaError, MessageSizeTooLargeError

from schemas.codec import Codec
from schemas.errors import BrokerUnavailable, RecordError, RecordTooLarge, TopicError
from schemas.records import Cancellation, Request, Resumption
from schemas.settings import LogSettings
from streams.calls.metrics import Metrics
from streams.log.clients import Headers, LogProducer, send_dead_letter
from streams.log.connecting import is_unreachable
from streams.log.retry import TRANSIENT_ERRORS

logger = logging.getLogger(__name__)
TROUBLE = (*TRANSIENT_ERRORS, TopicError)
RECONNECT_S = 1.0
ToRouter = Request | Cancellation | Resumption


class LogSender:
    """Sends records to routers while the log is there, and knows what is wrong with it."""

    def __init__(
        self, log: LogSettings, codec: Codec, metrics: Metrics, *, client_id: str, accept_ms: int
    ) -> None:
        self._log, self._codec, self._metrics = log, codec, metrics
        self._client_id, self._accept_ms = client_id, accept_ms
        self._failed_s = float("-inf")
        self._started: LogProducer | None = None
        self.trouble = "not connected yet"
        self.check_membership: Callable[[], object] = lambda: None  # raises BrokerUnavailable

    def started(self) -> LogProducer | None:
        """Return the producer; None while the log is away."""
        return self._started

    @property
    def producer(self) -> LogProducer:
        """Return the producer; raises BrokerUnavailable while there is none."""
        if self._started is None:
            raise BrokerUnavailable(f"the log cannot be written: {self.trouble}")
        return self._started

    @property
    def has_just_failed(self) -> bool:
        """Return whether the broker was away for a record within the last `RECONNECT_S`."""
        return asyncio.get_running_loop().time() - self._failed_s < RECONNECT_S

    async def start(self) -> LogProducer:
        """Start the producer, unless it is started, and return it."""
        if self._started is None:
            producer = LogProducer(self._log, self._codec, durable=True, client_id=self._client_id)
            await producer.start()
            self._started = producer
        return self._started

    async def stop(self) -> None:
        """Stop the producer; a failure is only logged."""
        if self._started is not None:
            await log_trouble(self._started.stop)

    async def send(self, record: ToRouter, headers: Headers = ()) -> None:
        """Send a record, and wait until the broker has acknowledged it.

        Raises BrokerUnavailable and RecordTooLarge.
        """
        topic, session_id = "cancellations", record.session_id
        if isinstance(record, Request):  # the other kinds wait for the broker
            self.check_membership()
            topic = "requests"
        producer = self.producer
        partition = producer.session_partition(session_id)
        try:
            async with asyncio.timeout(self._accept_ms / 1000):
                ack = await producer.send(
                    topic, record, key=session_id, partition=partition, headers=headers
                )
                await ack
        except MessageSizeTooLargeError as error:  # the broker's own limit is lower
            raise RecordTooLarge(f"{topic}: {record.request_id} is too large: {error}") from error
        except (TimeoutError, KafkaError, BrokerUnavailable) as error:
            if is_unreachable(error):
                self._failed_s = asyncio.get_running_loop().time()
                self.trouble = f"a record was not acknowledged ({type(error).__name__})"
            raise BrokerUnavailable(
                f"{topic}: {record.request_id} was not acknowledged within "
                f"{self._accept_ms} ms: {type(error).__name__}: {error}"
            ) from error

    async def bury(self, record: ConsumerRecord, error: RecordError) -> None:
        """Send an unreadable record to the dead-letter topic of its topic."""
        self._metrics.undecodable()
        logger.error("%s[%d]@%d: %s", record.topic, record.partition, record.offset, error)
        producer = self._started
        if producer is not None:
            await log_trouble(lambda: send_dead_letter(producer, record, error))


async def log_trouble(action: Callable[[], Awaitable[None]]) -> None:
    """Run an action, and only log a failure of the broker."""
    try:
        await action()
    except TROUBLE as error:
        logger.warning("%s: %s", type(error).__name__, error)
