"""Queued requests whose LoRA adapters no living worker can load.

They wait beside their model's queue, so that they delay no request that can be placed. They have
no order among them: back in the queue, each has the place that it would have had.
"""

from collections.abc import Iterator


class UnservedRequests:
    """The ids of such requests of one model; `tokens` counts those of their prompts."""

    def __init__(self) -> None:
        self.tokens = 0
        self._requests: dict[str, tuple[str, int]] = {}  # adapter and tokens, by id
        self._ids: dict[str, dict[str, None]] = {}  # by adapter

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    @property
    def adapters(self) -> list[str]:
        """Return the adapters that these requests wait for."""
        return list(self._ids)

    def add(self, request_id: str, adapter: str, tokens: int) -> None:
        """Add a request that is not in the queue."""
        self._requests[request_id] = adapter, tokens
        self._ids.setdefault(adapter, {})[request_id] = None
        self.tokens += tokens

    def remove(self, request_id: str) -> None:
        """Remove a request, if it is here."""
        if request_id in self._requests:
            adapter, tokens = self._requests.pop(request_id)
            self.tokens -= tokens
            del self._ids[adapter][request_id]
            if not self._ids[adapter]:
                del self._ids[adapter]

    def take(self, adapter: str) -> list[str]:
        """Remove and return all requests of an adapter, in the order in which they came."""
        request_ids = list(self._ids.get(adapter, {}))
        for request_id in request_ids:
            self.remove(request_id)
        return request_ids

    def take_last(self) -> str:
        """Remove and return the request that came last."""
        request_id = next(reversed(self._requests))
        self.remove(request_id)
        return request_id
