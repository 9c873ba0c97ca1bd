"""The protocol of embedders, which compute the vectors of texts.

`hashed.py` and `sentence.py` implement it; `choose.py` makes the one that the settings name.
"""

from collections.abc import Sequence
from typing import Protocol

from schemas.retrieval import Vector

Text = str | Sequence[int]  # a string, or its token ids by the embedder's own tokenizer


class Embedder(Protocol):
    """A text embedding model. Any thread may call its methods, `embed` one thread at a time."""

    name: str  # with its version, like all-minilm-l6-v2@0.1.0: collections are bound to it
    dim: int
    vocab: int  # token ids are below it
    tokens_max: int  # tokens of a text that it reads; it ignores the rest

    def token_starts(self, text: str) -> Sequence[int]:
        """Return where each token of a text starts, in characters, ascending."""

    def embed(self, texts: Sequence[Text]) -> Vector:
        """Return unit vectors, (texts, dim). Each depends on its own text, not on the others."""
