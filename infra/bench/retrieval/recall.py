"""Measures recall@5 by vectors, by words, and by both, beside an exact computation.

The corpus is Python's docstrings, of modules, classes and functions, each without its first
sentence, which is the question. The exact
computation reads the same passages from the log, and scores all of them: cosine similarity, and
BM25 (Robertson and Zaragoza 2009; k1 1.2, b 0.75) over the same terms. Both rankings are fused as
the pool's clients fuse them. The pool's BM25 stores the length of a passage above 40 terms in one
byte, as Lucene does, so neighbours in its ranking may be swapped.
"""

import importlib
import inspect
import math
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from infra.bench.benchmark import counting
from infra.bench.results import Bar, at_most
from infra.bench.retrieval.scene import Figures, Scene
from infra.handbook.library import Library, TextDocument
from schemas.records import DocumentPassages
from schemas.retrieval import unpack_vector
from schemas.rules.ranks import RANK_OFFSET
from streams.log.clock import wall_ms
from workers.vector.fulltext.terms import query_terms, terms_of

CHARS_MIN, CHARS_MAX = 200, 20_000  # of a document
QUESTION_CHARS_MIN, QUESTION_CHARS_MAX = 25, 300
# Importing these opens windows, browsers or terminals, or prints.
_LEFT_OUT = {"antigravity", "this", "idlelib", "turtle", "turtledemo", "test", "tkinter", "lib2to3"}
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'`(])|\n\s*\n")

COLLECTION = "docstrings"
MODES = ("vector", "words", "hybrid")
_K, _DEPTH = 5, 50  # documents, and passages to choose them from
_K1, _B = 1.2, 0.75
_ASK_MS = 30_000


@dataclass(frozen=True, slots=True)
class DocumentedObject:
    """An object of the standard library, with its docstring as a question and a text."""

    document_id: str
    question: str
    text: str


def corpus() -> list[DocumentedObject]:
    """Return all objects with distinct texts, in order of names; takes some seconds."""
    by_text: dict[str, DocumentedObject] = {}  # aliases have the same text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated modules
        docstrings = list(_docstrings())
    for name, doc in docstrings:
        first, *rest = _SENTENCE.split(inspect.cleandoc(doc), maxsplit=1)
        question, text = " ".join(first.split()), rest[0].strip() if rest else ""
        if not QUESTION_CHARS_MIN <= len(question) <= QUESTION_CHARS_MAX:
            continue
        if CHARS_MIN <= len(text) <= CHARS_MAX:
            by_text.setdefault(text, DocumentedObject(name, question, text))
    return sorted(by_text.values(), key=lambda document: document.document_id)


def _docstrings() -> Iterator[tuple[str, str]]:
    for name in sorted(sys.stdlib_module_names - _LEFT_OUT):
        if name.startswith("_"):
            continue
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError):  # a module of another operating system
            continue
        yield from _docstrings_of(module, name)


def _docstrings_of(module: ModuleType, name: str) -> Iterator[tuple[str, str]]:
    if module.__doc__:
        yield name, module.__doc__
    for attribute, value in sorted(vars(module).items()):
        if attribute.startswith("_") or getattr(value, "__module__", None) != name:
            continue
        if not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        if doc := inspect.getdoc(value):
            yield f"{name}.{attribute}", doc
        if inspect.isclass(value):
            for member, method in sorted(vars(value).items()):
                if not member.startswith("_") and inspect.isroutine(method) and method.__doc__:
                    yield f"{name}.{attribute}.{member}", method.__doc__


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
