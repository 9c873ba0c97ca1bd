"""Applies a journal's line to a router again: decodes its event and returns the effects.

Replays, redacted recordings and shadows use it; it does what the router itself did.
"""

from typing import Any

from infra.replay.recording import RecordingRow
from schemas.codec import Codec
from streams.core.effects import Effect
from streams.core.events import Event
from streams.core.router import Router
from streams.journal.journal import TELLS_ID, JournalLine, event_of_line


def content_of(codec: Codec, topic: str, value: bytes) -> Any:
    """Return the record or the id in a line's value; None for an empty value."""
    if topic in TELLS_ID:
        return value.decode()
    return codec.decode(value) if value else None


def event_of(line: JournalLine | RecordingRow, content: Any) -> Event:
    """Return the event that a line recorded."""
    return event_of_line(line.topic, line.partition, line.offset, line.ahead_ms, content)


def apply_event(router: Router, event: Event, now_ms: int) -> tuple[list[Effect], str]:
    """Apply an event; return the effects, and the core's exception as text, or "".

    After an exception the request is blamed, as in a router.
    """
    try:
        return router.apply(event, now_ms), ""
    except Exception as raised:  # the recorded router may have raised any
        return router.blame(now_ms), f"{type(raised).__name__}: {raised}"
