"""A retrieval client for a member that has other work, and works on while it cannot search.

The partition of `hits` is leased besides the member's others. While none is free, or hits cannot be
read, `client` is None, and this tries again.
"""

import asyncio
import logging
from collections.abc import Callable

from streams.log.membership import Membership
from streams.log.retrieval.client import RetrievalClient
from streams.log.retry import TRANSIENT_ERRORS

log = logging.getLogger("trivium.asker")
TRY_AGAIN_S = 5.0


class LeasedRetrievalClient:
    """Leases a partition and runs a client: `run` beside the membership until cancelled."""

    def __init__(
        self, make: Callable[[Membership], RetrievalClient], membership: Membership
    ) -> None:
        """Create it without a client; `make` creates one when the partition is leased."""
        self.client: RetrievalClient | None = None
        self._make, self._membership = make, membership

    async def run(self) -> None:
        """Lease a partition and pass hits to the searches that wait, until cancelled."""
        while True:
            try:
                await self._membership.lease("hits")
                await self._follow_hits()
            except Exception as error:  # no error may end the member
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
