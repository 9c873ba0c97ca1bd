"""Builds the dead letter of a prompt, for `<topic of prompts>.dlq`. Pure.

It is the record as it arrived, with headers for its position, the number of tries and the last
error.
"""

from dataclasses import replace

from schemas.codec import why_unreadable
from schemas.errors import TriviumError, clip_message
from schemas.rules.sizes import RECORD_BYTES_MAX
from schemas.topics import DEAD_LETTER_HEADERS, DEAD_LETTER_SUFFIX
from streams.bridge.records.record import PromptRecord
from streams.log.transactions import OutgoingRecord

NAME_CHARS_MAX = 1_024


def dead_letter(
    record: PromptRecord,
    error: TriviumError,
    *,
    attempts: int = 0,
    worker: str = "",
    reason: str = "",
    request_id: str = "",
    bytes_max: int = RECORD_BYTES_MAX,
) -> OutgoingRecord:
    """Return the dead letter, for partition 0. `worker` and `reason` are of the last attempt.

    If the record leaves no room for the headers, or is an unreadable batch, the dead letter has
    only the headers.
    """
    details = {
        "error-class": type(error).__name__,
        "error-code": error.code,
        "error-message": clip_message(error.message),
        "error-retriable": str(error.retriable).lower(),
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp_ms,
        "attempts": attempts,
        "worker": worker[:NAME_CHARS_MAX],
        "reason": reason[:NAME_CHARS_MAX],
        "request-id": request_id[:NAME_CHARS_MAX],
    }
    headers = tuple(
        (DEAD_LETTER_HEADERS + name, str(value).encode(errors="backslashreplace"))
        for name, value in details.items()
    )
    origin = OutgoingRecord(
        topic=record.topic + DEAD_LETTER_SUFFIX, partition=0, key=b"", value=None, headers=headers
    )
    whole = replace(
        origin,
        key=b"" if record.value is None and record.key is None else record.key,
        value=None if why_unreadable(record.value) else record.value,
        headers=(*record.headers, *headers),
    )
    return whole if whole.bytes_at_most <= bytes_max else origin
