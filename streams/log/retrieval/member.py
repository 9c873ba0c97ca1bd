"""A retrieval client with a membership of its own, for processes without another one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from schemas.codec import Codec
from schemas.records import MemberKind, MemberState
from schemas.settings import LogSettings
from streams.log.cancellation import cancel_and_wait
from streams.log.clients import LogProducer
from streams.log.membership import Membership
from streams.log.retrieval.client import RetrievalClient


@asynccontextmanager
async def open_retrieval_client(
    settings: LogSettings, codec: Codec, member_id: str
) -> AsyncIterator[RetrievalClient]:
    """Join the fleet, and yield a client until the end of the context.

    If the membership ends first, no hits arrive any more: the context's body is cancelled, and the
    LeaseError or BrokerUnavailable that ended the membership is raised.
    """
    producer = LogProducer(settings, codec, durable=True, client_id=member_id)
    membership = Membership(
        settings,
        codec,
        producer,
        member_id=member_id,
        kind=MemberKind.ASKER,
        lease_topics=["hits"],
    )
    try:
        async with AsyncExitStack() as closing, asyncio.TaskGroup() as tasks:
            closing.push_async_callback(producer.stop)
            closing.push_async_callback(membership.leave)
            await producer.start()
            await membership.join()
            client = RetrievalClient(settings, codec, producer, membership)
            closing.push_async_callback(client.stop)
            await client.start()
            membership.set_state(MemberState.READY)
            lives = [tasks.create_task(membership.run()), tasks.create_task(client.run())]
            try:
                yield client
            finally:
                await cancel_and_wait(*lives)
    except ExceptionGroup as group:  # the membership's end, or an error of the body
        raise (error := group.exceptions[0]) from error.__cause__
