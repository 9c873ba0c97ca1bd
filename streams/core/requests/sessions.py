"""Stores which decode worker has the KV of each session's last turn.

Bounded in number and age; evicts the least recently used first. A hint only: a lost entry costs a
cache hit and nothing else. The handlers of `streams/core/handlers` read and write it.
"""

from collections import OrderedDict

from schemas.records import Request, Session

SessionKey = tuple[str, str]  # tenant and id


def session_key(record: Request | Session) -> SessionKey:
    """Return a session's key. It has the tenant, because tenants choose their ids themselves and
    never share a home worker or KV."""
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
        """Return the session, or None if it was evicted or is too old."""
        entry = self._sessions.get(key)
        if entry is None or now_ms - entry[0].last_used_ms > self._ttl_ms:
            return None
        return entry[0]

    def put(self, session: Session, partition: int) -> None:
        """Store the latest state of a session."""
        key = session_key(session)
        self._sessions[key] = (session, partition)
        self._sessions.move_to_end(key)

    def evict(self, now_ms: int) -> list[tuple[SessionKey, int]]:
        """Drop sessions that are too old or beyond the limit; return keys and partitions."""
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
        """Drop a partition's sessions without a record: another router stores them now."""
        for key in [k for k, (_, p) in self._sessions.items() if p == partition]:
            del self._sessions[key]

    def all(self) -> dict[SessionKey, Session]:
        """Return all stored sessions by their keys."""
        return {key: session for key, (session, _) in self._sessions.items()}
