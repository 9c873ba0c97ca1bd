"""A line of a journal at a router once more: what it says, and what follows.

For replays, redacted recordings and shadows alike: it is what the router itself did.
"""

from typing import Any

from infra.replay.recording import RecordingRow
from schemas.codec import Codec
from streams.core.effects import Effect
from streams.core.events import Event
from streams.core.router import Router
from streams.journal.inputs import TELLS_ID, event_of_line
from streams.journal.journal import JournalLine


def content_of(codec: Codec, topic: str, value: bytes) -> Any:
    """The record or the id that a line's value holds; None for an empty one."""
    if topic in TELLS_ID:
        return value.decode()
    return codec.decode(value) if value else None


def event_of(line: JournalLine | RecordingRow, content: Any) -> Event:
    """The event that a line notes."""
    return event_of_line(line.topic, line.partition, line.offset, line.ahead_ms, content)


def apply_event(router: Router, event: Event, now_ms: int) -> tuple[list[Effect], str]:
    """The effects, and what the core raised, if it did: then, as ever, the request is blamed."""
    try:
        return router.apply(event, now_ms), ""
    except Exception as raised:  # as it may have been
        return router.blame(now_ms), f"{type(raised).__name__}: {raised}"
