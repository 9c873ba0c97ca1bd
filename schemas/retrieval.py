"""What askers and retrieval workers agree on: vectors as bytes, shards, and how hits are merged.

Pure. A document belongs to one shard, whatever its collection; every shard answers every retrieval
with its nearest documents, and the asker keeps the nearest of all.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any

import numpy as np

from schemas.errors import (
    DeadlineExceeded,
    EmptyIndex,
    InvalidVector,
    RecordError,
    UnknownCollection,
    UnknownFilterField,
    from_wire,
)
from schemas.fleet import FleetView
from schemas.records import Hits, MemberKind, MemberState, WireError
from schemas.rules.numbers import check_numbers
from schemas.rules.sizes import SHARDS_MAX

Vector = np.ndarray[Any, np.dtype[np.float32]]
# A shard that says so has nothing to find where another shard may have.
_HAS_NONE = {UnknownCollection.code, EmptyIndex.code, UnknownFilterField.code}


def pack_vector(values: Any) -> bytes:
    """Numbers as they cross the log: float32, little-endian."""
    try:
        return np.ascontiguousarray(values, "<f4").reshape(-1).tobytes()
    except (TypeError, ValueError) as error:
        raise InvalidVector(f"expected numbers, found {values!r:.80}") from error


def unpack_vector(data: bytes) -> Vector:
    """Inverse of `pack_vector`, shape (dim,); raises RecordError where bytes are left over."""
    if len(data) % 4:
        raise RecordError(f"vector: expected a multiple of 4 bytes, found {len(data)}")
    return np.frombuffer(data, "<f4")


def shard_of(document_id: str, shards: int) -> int:
    """The shard that holds a document; CRC-32 of the UTF-8 id, so that every process agrees."""
    return zlib.crc32(document_id.encode()) % shards


@dataclass(frozen=True, slots=True)
class Layout:
    """How many shards there are, and which of them a ready worker serves."""

    shards: int
    living: frozenset[int]


def layout_of(view: FleetView, now_ms: int) -> Layout:
    """What the fleet serves. While shards are changed in number, the layout with fewer gaps counts,
    of equal ones that with more shards.
    """
    found: dict[int, set[int]] = {}
    for member in view.living(MemberKind.WORKER, now_ms):
        search = member.registration.search
        if search is None or not 0 <= search.shard < search.shards <= SHARDS_MAX:
            continue  # nobody can mean it, and whoever is asked of it would never be done
        if member.state is MemberState.READY:
            found.setdefault(search.shards, set()).add(search.shard)
    if not found:
        return Layout(0, frozenset())
    shards = min(found, key=lambda count: (count - len(found[count]), -count))
    return Layout(shards, frozenset(found[shards]))


def check_hits(hits: Hits) -> None:
    """Raise RecordError for hits that no shard can mean."""
    check_numbers(hits)
    distances = unpack_vector(hits.distances)
    if hits.shard >= hits.shards:
        raise RecordError(f"hits: expected a shard below {hits.shards}, found {hits.shard}")
    if len(distances) != len(hits.document_ids) or not np.isfinite(distances).all():
        raise RecordError(
            f"hits: expected {len(hits.document_ids)} finite distances, found {distances!r:.200}"
        )


@dataclass(frozen=True, slots=True)
class Hit:
    """A document and its distance: smaller is nearer."""

    document_id: str
    distance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A retrieval's answer; `missing` tells by shard why its documents were not searched."""

    retrieval_id: str
    hits: tuple[Hit, ...]
    shards: int
    missing: Mapping[int, WireError]
    exact: bool
    seeds: tuple[str, ...]
    extends: int
    distances_computed: int
    took_ms: float  # at the slowest shard, with its wait for a slot

    @property
    def is_complete(self) -> bool:
        return not self.missing


def merged(retrieval_id: str, answers: Mapping[int, Hits], shards: int, k: int) -> Found:
    """The k nearest documents of all shards, equal distances in order of ids.

    Raises the error of the shards where none of them could search, and DeadlineExceeded where none
    answered.
    """
    good = {shard: hits for shard, hits in answers.items() if hits.error is None}
    if not good:
        raise _refusal(answers, shards)
    missing = {
        shard: _why_missing(answers.get(shard))
        for shard in range(shards)
        if shard not in good and not _has_none(answers.get(shard))
    }
    return Found(
        retrieval_id=retrieval_id,
        hits=tuple(
            nsmallest(
                k,
                (hit for hits in good.values() for hit in _hits(hits)),
                key=lambda hit: (hit.distance, hit.document_id),
            )
        ),
        shards=shards,
        missing=missing,
        exact=not missing and all(hits.exact for hits in good.values()),
        seeds=tuple(seed for _, hits in sorted(good.items()) for seed in hits.seeds),
        extends=max(hits.extends for hits in good.values()),
        distances_computed=sum(hits.distances_computed for hits in good.values()),
        took_ms=max(hits.took_ms for hits in good.values()),
    )


def _hits(hits: Hits) -> list[Hit]:
    return list(map(Hit, hits.document_ids, unpack_vector(hits.distances).tolist()))


def _has_none(hits: Hits | None) -> bool:
    return hits is not None and hits.error is not None and hits.error.code in _HAS_NONE


def _why_missing(hits: Hits | None) -> WireError:
    if hits is not None and hits.error is not None:
        return hits.error
    return DeadlineExceeded("the shard did not answer before the deadline").to_wire()


def _refusal(answers: Mapping[int, Hits], shards: int) -> Exception:
    errors = [hits.error for _, hits in sorted(answers.items()) if hits.error is not None]
    if not errors:
        return DeadlineExceeded(
            f"none of {shards} shards answered before the deadline; give it more time or look at "
            "`trivium status`"
        )
    silent = len(answers) < shards
    plain = [error for error in errors if error.code not in _HAS_NONE]
    if not plain and silent:
        return DeadlineExceeded(
            f"{shards - len(answers)} of {shards} shards did not answer before the deadline, and "
            f"the others have nothing: {errors[0].message}"
        )
    return from_wire((plain or errors)[0])
