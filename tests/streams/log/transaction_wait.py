"""Waits for what a transaction has committed: it is seen a moment after."""

from schemas.settings import LogSettings
from streams.log.transactions import Transactions


async def settle(log: LogSettings, transactional_id: str) -> None:
    """The next writer under the id begins when all that was before is seen everywhere."""
    transactions = Transactions(log, transactional_id)
    await transactions.start()
    await transactions.stop()
