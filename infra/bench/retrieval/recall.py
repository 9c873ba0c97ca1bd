"""Measures recall@5 by vectors, by words, and by both, beside an exact computation.

The corpus is Python's docstrings, each without its first sentence, which is the question. The exact
computation reads the same passages from the log, and scores all of them: cosine similarity, and
BM25 (Robertson and Zaragoza 2009; k1 1.2, b 0.75) over the same terms. Both rankings are fused as
the pool's clients fuse them. The pool's BM25 stores the length of a passage above 40 terms in one
byte, as Lucene does, so neighbours in its ranking may be swapped.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from infra.bench.benchmark import counting
from infra.bench.results import Bar, at_most
from infra.bench.retrieval.docstrings import DocumentedObject, corpus
from infra.bench.retrieval.scene import Figures, Scene
from infra.handbook.library import Library, TextDocument
from schemas.records import DocumentPassages
from schemas.retrieval import unpack_vector
from schemas.rules.ranks import RANK_OFFSET
from streams.log.clock import wall_ms
from workers.vector.fulltext.terms import query_terms, terms_of

COLLECTION = "docstrings"
MODES = ("vector", "words", "hybrid")
_K, _DEPTH = 5, 50  # documents, and passages to choose them from
_K1, _B = 1.2, 0.75
_ASK_MS = 30_000


class Exact:
    """Ranks all passages of a collection exactly."""

    def __init__(self, documents: Sequence[DocumentPassages]) -> None:
        pairs = [
            (document.document_id, chunk) for document in documents for chunk in document.chunks
        ]
        self.documents = [document_id for document_id, _ in pairs]
        self._vectors = np.stack([unpack_vector(chunk.vector) for _, chunk in pairs])
        self._terms = [Counter(terms_of(chunk.text)) for _, chunk in pairs]
        lengths = np.array([terms.total() for terms in self._terms], np.float64)
        self._norms = _K1 * (1 - _B + _B * lengths / lengths.mean())
        self._having = Counter(term for terms in self._terms for term in terms)

    def vector(self, query: Any) -> list[int]:
        """Return the `_DEPTH` passages with the highest cosine similarity, best first."""
        order = np.argsort(-(self._vectors @ query), kind="stable")
        return [int(row) for row in order[:_DEPTH]]

    def words(self, text: str) -> list[int]:
        """Return the `_DEPTH` best passages by BM25, without those that share no term."""
        count = len(self._terms)
        scores = np.zeros(count)
        for term in query_terms(text):
            having = self._having[term]
            weight = math.log(1 + (count - having + 0.5) / (having + 0.5))
            often = np.array([terms[term] for terms in self._terms], np.float64)
            scores += weight * often * (_K1 + 1) / (often + self._norms)
        order = np.argsort(-scores, kind="stable")[:_DEPTH]
        return [int(row) for row in order if scores[row] > 0]

    def documents_of(self, *rankings: Sequence[int]) -> list[str]:
        """Return the best documents of rankings of passages, fused by reciprocal ranks."""
        scores: dict[int, float] = {}
        for ranking in rankings:
            for rank, row in enumerate(ranking, start=1):
                scores[row] = scores.get(row, 0.0) + 1 / (RANK_OFFSET + rank)
        best = sorted(scores, key=lambda row: -scores[row])
        return list(dict.fromkeys(self.documents[row] for row in best))[:_K]


async def measure(scene: Scene) -> Figures:
    """Return the recall by mode, of the pool and of the exact computation."""
    options, books = scene.options, scene.books
    described = corpus()[: options.docstrings or None]
    texts = [TextDocument(document.document_id, document.text) for document in described]
    await scene.put(COLLECTION, texts)
    exact = Exact(await books.passages(COLLECTION))
    count = min(options.questions, len(described))
    sample = random.Random(options.seed).sample(described, count)
    progress, hits = counting("recall", count), {mode: {"pool": 0, "exact": 0} for mode in MODES}
    for document in sample:
        for mode, best in (await _exact(books, exact, document)).items():
            hits[mode]["exact"] += document.document_id in best
            hits[mode]["pool"] += document.document_id in await _pool(books, document, mode)
        progress(advance=1)
    shares = {
        mode: {who: hit_count / count for who, hit_count in counts.items()}
        for mode, counts in hits.items()
    }
    return {"documents": len(texts), "passages": len(exact.documents), "recall": shares}


async def _exact(books: Library, exact: Exact, document: DocumentedObject) -> dict[str, list[str]]:
    embedded = await books.client.embed([document.question], deadline_ms=wall_ms() + _ASK_MS)
    by_vector, by_words = exact.vector(embedded.vectors[0]), exact.words(document.question)
    return {
        "vector": exact.documents_of(by_vector),
        "words": exact.documents_of(by_words),
        "hybrid": exact.documents_of(by_vector, by_words),
    }


async def _pool(books: Library, document: DocumentedObject, mode: Any) -> list[str]:
    answer = await books.client.search_text(
        document.question,
        collection=COLLECTION,
        k=_DEPTH,
        mode=mode,
        deadline_ms=wall_ms() + _ASK_MS,
    )
    return list(dict.fromkeys(passage.document_id for passage in answer.passages))[:_K]


def bars(figures: Figures) -> list[Bar]:
    """Return bars on how far the pool's recall is below the exact one."""
    return [
        at_most(f"recall@5 below exact, {mode}", row["exact"] - row["pool"], 0.01, "share")
        for mode, row in figures["recall"].items()
    ]
