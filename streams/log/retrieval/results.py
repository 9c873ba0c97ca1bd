"""The result of a retrieval: which shards serve, and the hits of all shards merged.

Pure but for the time of the record. For a text, shards answer with the nearest documents and with
the best ones by words; this merges both, and fuses them (`schemas/rules/ranks.py`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from math import inf
from typing import Any

from schemas.errors import (
    DeadlineExceeded,
    EmptyIndex,
    UnknownCollection,
    UnknownFilterField,
    from_wire,
)
from schemas.fleet import FleetView, Member
from schemas.records import (
    EmbedCapability,
    Hits,
    MemberKind,
    MemberState,
    Passage,
    Quoted,
    Retrieved,
    WireError,
)
from schemas.retrieval import WORDS, shard_of, unpack_vector
from schemas.rules.embedders import public_name
from schemas.rules.ranks import depth_of, fuse_ranks
from schemas.rules.sizes import SHARDS_MAX, fit_passages
from streams.log.clock import wall_ms

# Errors of a shard that has nothing to search, while another shard may have.
_HAS_NONE = {UnknownCollection.code, EmptyIndex.code, UnknownFilterField.code}


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The number of shards, and those that a ready worker serves."""

    shards: int
    living: frozenset[int]


def layout_of(view: FleetView, now_ms: int) -> ShardLayout:
    """Return the layout that the fleet serves.

    While the number of shards changes, the layout with fewer missing shards counts, on ties the one
    with more shards.
    """
    by_count: dict[int, set[int]] = {}
    for member in view.living(MemberKind.WORKER, now_ms):
        search = member.registration.search
        if search is None or not 0 <= search.shard < search.shards <= SHARDS_MAX:
            continue  # invalid, and its retrievals would never finish
        if member.state is MemberState.READY:
            by_count.setdefault(search.shards, set()).add(search.shard)
    if not by_count:
        return ShardLayout(0, frozenset())
    shards = min(by_count, key=lambda count: (count - len(by_count[count]), -count))
    return ShardLayout(shards, frozenset(by_count[shards]))


def partitions_at(view: FleetView, place: str, now_ms: int) -> frozenset[int]:
    """Return the partitions of `retrievals` that replicas in a place serve, for all living shards.

    Placement (a) of Trinity: a replica of the index in the clients' own node.
    """
    layout = layout_of(view, now_ms)
    by_shard: dict[int, set[int]] = {shard: set() for shard in layout.living}
    for member in view.living(MemberKind.WORKER, now_ms):
        search, load = member.registration.search, member.search
        if search is None or load is None or member.state is not MemberState.READY:
            continue
        if search.place == place and search.shards == layout.shards and search.shard in by_shard:
            by_shard[search.shard].update(load.partitions)
    return frozenset(set.intersection(*by_shard.values())) if by_shard else frozenset()


def embedding_workers(view: FleetView, now_ms: int, pool: str | None = None) -> list[Member]:
    """Return the workers that are ready to embed texts, of one pool or of all."""
    living = view.living(MemberKind.WORKER, now_ms)
    ready = (member for member in living if member.state is MemberState.READY)
    return [
        member
        for member in ready
        if (embedding := member.registration.embedding) is not None
        and pool in (None, embedding.pool)
    ]


def embedders(view: FleetView) -> dict[str, EmbedCapability]:
    """Return the embedding models by the names of their pools, also those whose workers are silent
    and may be back."""
    capabilities = (
        member.registration.embedding
        for member in view.members.values()
        if member.state is not MemberState.GONE
    )
    return {embedding.pool: embedding for embedding in capabilities if embedding is not None}


def embedder_of(view: FleetView, collection: str, pools: Collection[str]) -> str:
    """Return the embedding model that a collection is bound to, if it is that of another pool than
    the first; empty otherwise, and while no worker has the collection."""
    for member in view.members.values():
        for state in member.search.collections if member.search is not None else ():
            if state.name == collection and state.embedder:
                return state.embedder if public_name(state.embedder) in pools else ""
    return ""


@dataclass(frozen=True, slots=True)
class Hit:
    """A document, or a passage of one, and its distance: smaller is nearer.

    Only searches for texts set the other fields. `score` is the cosine similarity to the text's
    vector, or the fused score if there is none.
    """

    document_id: str  # for a passage, DOCUMENT#NUMBER
    distance: float  # infinite if it was found by its words only
    score: float = 0.0
    fused: float = 0.0  # fused score of ranks, which orders hits
    cosine: float | None = None
    words: float | None = None  # BM25; None if it was not found by its words
    passage: Passage | None = None  # if passages were requested


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalResult:
    """A retrieval's result; `missing` has, by shard, why its documents were not searched."""

    retrieval_id: str
    hits: tuple[Hit, ...]
    shards: int
    missing: Mapping[int, WireError]
    exact: bool
    seeds: tuple[str, ...]
    extends: int
    distances_computed: int
    took_ms: float  # at the slowest shard, with its wait for a slot
    wait_ms: float = 0.0  # of that, the longest wait for a slot
    embedded_ms: float = 0.0  # at the embedding pool
    mode: str = ""  # of a search for a text: vector, words or hybrid
    degraded: str = ""  # why the search was by words only, although another mode was requested
    changed: frozenset[str] = frozenset()  # quoted documents that must not be quoted any more

    @property
    def is_complete(self) -> bool:
        return not self.missing

    @property
    def passages(self) -> tuple[Passage, ...]:
        """Return the passages of the hits, the best first, with their scores."""
        return tuple(hit.passage for hit in self.hits if hit.passage is not None)


def merge_hits(
    retrieval_id: str,
    answers: Mapping[int, Hits],
    shards: int,
    k: int,
    *,
    by_text: bool = False,
    quoted: Sequence[Quoted] = (),
) -> RetrievalResult:
    """Return the k nearest documents of all shards, on ties in order of ids; for a text the k best.

    Raises the shards' error if none of them could search, and DeadlineExceeded if none answered.
    """
    good = {shard: hits for shard, hits in answers.items() if hits.error is None}
    if not good:
        raise _refusal(answers, shards)
    missing = {
        shard: _why_missing(answers.get(shard))
        for shard in range(shards)
        if shard not in good and not _has_none(answers.get(shard))
    }
    modes = {hits.mode for hits in good.values() if by_text} or {""}
    return RetrievalResult(
        retrieval_id=retrieval_id,
        hits=tuple((_fuse_hits if by_text else _nearest)(good.values(), k)),
        shards=shards,
        missing=missing,
        exact=not missing and all(hits.exact for hits in good.values()),
        seeds=tuple(seed for _, hits in sorted(good.items()) for seed in hits.seeds),
        extends=max(hits.extends for hits in good.values()),
        distances_computed=sum(hits.distances_computed for hits in good.values()),
        took_ms=max(hits.took_ms for hits in good.values()),
        wait_ms=max(hits.wait_ms for hits in good.values()),
        embedded_ms=max(hits.embedded_ms for hits in good.values()),
        mode=WORDS if WORDS in modes else max(modes),
        changed=_changed_ids(quoted, answers, shards),
    )


def _changed_ids(
    quoted: Sequence[Quoted], answers: Mapping[int, Hits], shards: int
) -> frozenset[str]:
    """Return the quoted documents that have changed by their shards, or whose shard is missing."""
    changes: dict[int, Collection[str]] = {
        shard: hits.changed
        for shard, hits in answers.items()
        if hits.error is None or _has_none(hits)
    }
    every = {quotation.document_id for quotation in quoted}
    return frozenset(
        document_id
        for document_id in every
        if (shard := shard_of(document_id, shards)) not in changes or document_id in changes[shard]
    )


def _nearest(answers: Iterable[Hits], k: int) -> list[Hit]:
    candidates = (hit for hits in answers for hit in _hits(hits))
    return nsmallest(k, candidates, key=lambda hit: (hit.distance, hit.document_id))


def _hits(hits: Hits) -> list[Hit]:
    return list(map(Hit, hits.document_ids, unpack_vector(hits.distances).tolist()))


def _fuse_hits(answers: Collection[Hits], k: int) -> list[Hit]:
    """Merge both lists over all shards, then fuse them: ranks are those of the whole collection."""
    distances: dict[str, float] = {}
    words: dict[str, float] = {}
    cosines: dict[str, float] = {}
    passages: dict[str, Passage] = {}
    for hits in answers:
        distances |= _numbers(hits.document_ids, hits.distances)
        words |= _numbers(hits.word_ids, hits.word_scores)
        cosines |= _numbers(hits.document_ids, hits.cosines)
        cosines |= _numbers(hits.word_ids, hits.word_cosines)
        passages |= {passage.passage_id: passage for passage in hits.passages}
    depth = depth_of(k)
    nearest = nsmallest(
        depth, distances, key=lambda document_id: (distances[document_id], document_id)
    )
    by_words = nsmallest(depth, words, key=lambda document_id: (-words[document_id], document_id))
    fused_hits = []
    for document_id, rank_score in list(fuse_ranks((nearest, by_words)).items())[:k]:
        cosine, passage = cosines.get(document_id), passages.get(document_id)
        score = rank_score if cosine is None else cosine
        fused_hits.append(
            Hit(
                document_id,
                distances.get(document_id, inf),
                score=score,
                fused=rank_score,
                cosine=cosine,
                words=words.get(document_id),
                passage=passage and replace(passage, score=score),
            )
        )
    return fused_hits


def _numbers(ids: Sequence[str], data: bytes) -> dict[str, float]:
    """Return the numbers by id; empty if `data` has none for these ids."""
    return dict(zip(ids, unpack_vector(data).tolist(), strict=False))


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


def retrieved_record(result: RetrievalResult, **fields: Any) -> Retrieved:
    """Return the record of a result with the passages that fit; `fields` name the request."""
    passages = fit_passages(result.passages)
    return Retrieved(
        passages=passages,
        left_out=len(result.passages) - len(passages),
        shards=result.shards,
        missing=tuple(sorted(result.missing)),
        extends=result.extends,
        distances_computed=result.distances_computed,
        embedded_ms=result.embedded_ms,
        wait_ms=result.wait_ms,
        took_ms=result.took_ms,
        at_ms=wall_ms(),
        mode=result.mode,
        degraded=result.degraded,
        **fields,
    )
