"""An asker with a membership of its own, for those who do nothing else in the fleet."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from schemas.codec import Codec
from schemas.log.clients import LogProducer
from schemas.log.endings import ended
from schemas.log.membership import Membership
from schemas.log.retrieval.asker import Asker
from schemas.records import MemberKind, MemberState
from schemas.settings import LogSettings


@asynccontextmanager
async def asking(settings: LogSettings, codec: Codec, member_id: str) -> AsyncIterator[Asker]:
    """Join, and be asked through until the end.

    When it is a member no longer, no hits reach it: who asks within is cancelled, and the
    LeaseError or BrokerUnavailable is raised that ended it.
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
    asker: Asker | None = None
    try:
        await producer.start()
        await membership.join()
        asker = Asker(settings, codec, producer, membership)
        await asker.start()
        membership.set_state(MemberState.READY)
        async with asyncio.TaskGroup() as tasks:
            lives = [tasks.create_task(membership.run()), tasks.create_task(asker.run())]
            try:
                yield asker
            finally:
                await ended(*lives)
    except ExceptionGroup as group:  # a life that ended, or what was raised within
        raise (error := group.exceptions[0]) from error.__cause__
    finally:
        if asker is not None:
            await asker.stop()
        await membership.leave()
        await producer.stop()
