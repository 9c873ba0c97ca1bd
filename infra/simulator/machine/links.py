"""KV transfers between workers: each link carries one transfer at a time, in order of posting.

A worker has one link per direction. The last of several transfers on a link finishes as if they had
shared the bandwidth; the first ones finish earlier.
"""

from collections.abc import Callable

from infra.simulator.log.clock import Clock
from infra.simulator.machine.latency import Setup


class KvLinks:
    """All links of a cluster; counts the bytes moved by each request."""

    def __init__(self, clock: Clock, setup: Setup) -> None:
        self.clock = clock
        self.setup = setup
        self.slow = 1.0  # a fault: factor on the time of transfers
        self.moved_bytes: dict[str, int] = {}  # by request
        self._free_ms: dict[tuple[str, bool], float] = {}  # by worker, and whether it sends

    def move(
        self,
        request_id: str,
        source: str,
        target: str,
        kv_bytes: int,
        on_done: Callable[[float], None],
    ) -> None:
        """Move bytes; `on_done` gets the time that it took in ms, waiting included."""
        now_ms = self.clock.now_ms
        out, into = (source, True), (target, False)
        begin_ms = max(now_ms, self._free_ms.get(out, 0.0), self._free_ms.get(into, 0.0))
        latency_ms = self.setup.link.latency_ms
        carry_ms = self.slow * (self.setup.transfer_ms(kv_bytes) - latency_ms)
        self._free_ms[out] = self._free_ms[into] = begin_ms + carry_ms
        self.moved_bytes[request_id] = self.moved_bytes.get(request_id, 0) + kv_bytes
        end_ms = begin_ms + carry_ms + latency_ms
        self.clock.at(end_ms, lambda: on_done(end_ms - now_ms))
