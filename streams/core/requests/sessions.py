"""Remembered conversations: which decode worker holds the KV of a session's last turn.

Bounded in number and age, least recently used first out. A hint only: forgetting costs a cache hit
and nothing else.
"""

from collections import OrderedDict

from schemas.records import Request, Session

SessionKey = tuple[str, str]  # tenant and id


def session_key(record: Request | Session) -> SessionKey:
    """What a conversation is known by: ids are their tenants' own, and no tenant's home or KV is
    another's.
    """
    return record.tenant, record.session_id


class Sessions:
    """Sessions by `session_key`, each with its partition, in order of use."""

    def __init__(self, *, sessions_max: int, ttl_ms: int) -> None:
        self._sessions_max = sessions_max
        self._ttl_ms = ttl_ms
        self._sessions: OrderedDict[SessionKey, tuple[Session, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, key: SessionKey, now_ms: int) -> Session | None:
        """The session, unless it was forgotten or is too old."""
        entry = self._sessions.get(key)
        if entry is None or now_ms - entry[0].last_used_ms > self._ttl_ms:
            return None
        return entry[0]

    def put(self, session: Session, partition: int) -> None:
        """Remember the latest state of a session."""
        key = session_key(session)
        self._sessions[key] = (session, partition)
        self._sessions.move_to_end(key)

    def evict(self, now_ms: int) -> list[tuple[SessionKey, int]]:
        """Forget what is too old or too many; returns keys with their partitions."""
        evicted = []
        while self._sessions:
            key, (session, partition) = next(iter(self._sessions.items()))
            too_old = now_ms - session.last_used_ms > self._ttl_ms
            if not too_old and len(self._sessions) <= self._sessions_max:
                break
            del self._sessions[key]
            evicted.append((key, partition))
        return evicted

    def drop(self, partition: int) -> None:
        """Forget a partition without a word: another router remembers it now."""
        for key in [k for k, (_, p) in self._sessions.items() if p == partition]:
            del self._sessions[key]

    def all(self) -> dict[SessionKey, Session]:
        """Return all remembered sessions by their keys."""
        return {key: session for key, (session, _) in self._sessions.items()}
