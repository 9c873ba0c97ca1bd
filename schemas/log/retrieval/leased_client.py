"""An asker of a member that does something else, and that goes on where it cannot ask.

The partition of `hits` is leased beside the member's others. Where none is free, or hits cannot be
read, `client` is None meanwhile, and it is tried again.
"""

import asyncio
import logging
from collections.abc import Callable

from schemas.log.membership import Membership
from schemas.log.retrieval.client import RetrievalClient
from schemas.log.retry import TRANSIENT_ERRORS

log = logging.getLogger("trivium.asker")
TRY_AGAIN_S = 5.0


class LeasedRetrievalClient:
    """`run` beside the membership's until cancelled."""

    def __init__(
        self, make: Callable[[Membership], RetrievalClient], membership: Membership
    ) -> None:
        """`make` is called when the partition is leased."""
        self.client: RetrievalClient | None = None
        self._make, self._membership = make, membership

    async def run(self) -> None:
        """Lease a partition and hand hits to those who wait, until cancelled."""
        while True:
            try:
                await self._membership.lease("hits")
                await self._follow_hits()
            except Exception as error:  # whatever it is, the member goes on
                log.warning(
                    "%s: goes on without searches: %s; tries again",
                    *(self._membership.member_id, error),
                    exc_info=not isinstance(error, TRANSIENT_ERRORS),
                )
            await asyncio.sleep(TRY_AGAIN_S)

    async def _follow_hits(self) -> None:
        client = self._make(self._membership)
        await client.start()
        try:
            self.client = client
            await client.run()
        finally:
            self.client = None
            await client.stop()
