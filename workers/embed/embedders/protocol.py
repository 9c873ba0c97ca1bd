"""What a text's vector comes from: the protocol of embedders.

Implemented by `hashed.py` and `sentence.py`; `choose.py` makes the one that the settings name.
"""

from collections.abc import Sequence
from typing import Protocol

from schemas.retrieval import Vector

Text = str | Sequence[int]  # the latter are its tokens, by the embedder's own tokenizer


class Embedder(Protocol):
    """Both functions may be called from any thread, `embed` from one at a time."""

    name: str  # with its version, as all-minilm-l6-v2@0.1.0: collections are bound to it
    dim: int
    vocab: int  # tokens are below it
    tokens_max: int  # of a text; what comes after them is not seen

    def token_starts(self, text: str) -> Sequence[int]:
        """Where each token of a text begins, in characters, ascending."""

    def embed(self, texts: Sequence[Text]) -> Vector:
        """A vector of length one in each row. It depends on its own text, not on the others."""
