"""Rules that clients and retrieval workers share: vectors as bytes, shards, modes, valid hits.

Pure. A document belongs to one shard, whatever its collection, and its passages with it; every
shard answers every retrieval with its nearest documents, and the client keeps the nearest of all
(`streams/log/retrieval/results.py`).
"""

import zlib
from typing import Any

import numpy as np

from schemas.errors import (
    InvalidVector,
    RecordError,
)
from schemas.records import Hits
from schemas.rules.numbers import check_numbers

Vector = np.ndarray[Any, np.dtype[np.float32]]
WORDS = "words"
MODES = ("hybrid", "vector", WORDS)  # of a search for a text
CHECK = "check"  # no search; only report which quoted documents have changed


def pack_vector(values: Any) -> bytes:
    """Return numbers as bytes for the log: float32, little-endian. Raise InvalidVector."""
    try:
        return np.ascontiguousarray(values, "<f4").reshape(-1).tobytes()
    except (TypeError, ValueError) as error:
        raise InvalidVector(f"expected numbers, found {values!r:.80}") from error


def unpack_vector(data: bytes) -> Vector:
    """Return the vector, shape (dim,), of `pack_vector`'s bytes. Raise RecordError for others."""
    if len(data) % 4:
        raise RecordError(f"vector: expected a multiple of 4 bytes, found {len(data)}")
    return np.frombuffer(data, "<f4")


def shard_of(document_id: str, shards: int) -> int:
    """Return the shard of a document: CRC-32 of the UTF-8 id, the same in every process."""
    return zlib.crc32(document_id.encode()) % shards


def check_hits(hits: Hits) -> None:
    """Raise RecordError for hits that are invalid."""
    check_numbers(hits)
    if hits.shard >= hits.shards:
        raise RecordError(f"hits: expected a shard below {hits.shards}, found {hits.shard}")
    if hits.mode not in ("", *MODES, CHECK):
        raise RecordError(f"hits: expected a mode of {', '.join(MODES)}, found {hits.mode!r:.80}")
    nearest, by_words = len(hits.document_ids), len(hits.word_ids)
    for name, counts in (
        ("distances", {nearest}), ("cosines", {nearest, 0}),
        ("word_scores", {by_words}), ("word_cosines", {by_words, 0}),
    ):  # fmt: skip
        values = unpack_vector(getattr(hits, name))
        if len(values) not in counts or not np.isfinite(values).all():
            raise RecordError(f"hits: expected {max(counts)} finite {name}, found {values!r:.200}")
    if len(hits.passages) > nearest + by_words:
        raise RecordError(f"hits: expected {nearest + by_words} passages at most, found more")
