"""Remembered conversations: which decode worker holds the KV of a session's last turn.

Bounded in number and age, least recently used first out. A hint only: forgetting costs a cache hit
and nothing else.
"""

from collections import OrderedDict

from schemas.records import Session


class Sessions:
    """Sessions by id, each with its partition, in order of use."""

    def __init__(self, *, sessions_max: int, ttl_ms: int) -> None:
        self._sessions_max = sessions_max
        self._ttl_ms = ttl_ms
        self._known: OrderedDict[str, tuple[Session, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, session_id: str, now_ms: int) -> Session | None:
        """The session, unless it was forgotten or is too old."""
        found = self._known.get(session_id)
        if found is None or now_ms - found[0].last_used_ms > self._ttl_ms:
            return None
        return found[0]

    def put(self, session: Session, partition: int) -> None:
        """Remember the latest state of a session."""
        self._known[session.session_id] = (session, partition)
        self._known.move_to_end(session.session_id)

    def evict(self, now_ms: int) -> list[tuple[str, int]]:
        """Forget what is too old or too many; returns ids with their partitions."""
        evicted = []
        while self._known:
            session_id, (session, partition) = next(iter(self._known.items()))
            too_old = now_ms - session.last_used_ms > self._ttl_ms
            if not too_old and len(self._known) <= self._sessions_max:
                break
            del self._known[session_id]
            evicted.append((session_id, partition))
        return evicted

    def drop(self, partition: int) -> None:
        """Forget a partition without a word: another router remembers it now."""
        for session_id in [s for s, (_, p) in self._known.items() if p == partition]:
            del self._known[session_id]

    def all(self) -> dict[str, Session]:
        """Everything remembered, by id."""
        return {session_id: session for session_id, (session, _) in self._known.items()}
