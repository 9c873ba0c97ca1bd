"""Holds records of a partition back until it has been rebuilt."""

import asyncio


class Gate:
    """One future per partition: true when records may pass, false when it was taken away."""

    def __init__(self) -> None:
        self._passing: dict[int, asyncio.Future[bool]] = {}

    async def passes(self, partition: int) -> bool:
        """Wait until the partition is rebuilt; false where it was taken away instead."""
        passing = self._passing.get(partition)
        if passing is None:  # its assignment has not been announced yet
            passing = self._passing[partition] = asyncio.get_running_loop().create_future()
        return passing.result() if passing.done() else await asyncio.shield(passing)

    def open(self, partition: int) -> None:
        """The partition is rebuilt."""
        passing = self._passing.get(partition)
        if passing is None:
            passing = self._passing[partition] = asyncio.get_running_loop().create_future()
        if not passing.done():
            passing.set_result(True)

    def keep(self, partitions: set[int]) -> None:
        """Turn away what waits for any other partition."""
        for partition in set(self._passing) - partitions:
            self._turn_away(partition)

    def close(self) -> None:
        """Turn everything away and hold back what comes next."""
        for partition in list(self._passing):
            self._turn_away(partition)

    def _turn_away(self, partition: int) -> None:
        passing = self._passing.pop(partition)
        if not passing.done():
            passing.set_result(False)
