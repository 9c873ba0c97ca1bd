"""An embedder without a model: words and pairs of words, hashed into 256 dimensions.

It is for tests, simulated stacks and trials. Only texts with common words are near each other. It
needs no torch, starts at once, and returns the same bytes on every machine.
"""

import unicodedata
import zlib
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from schemas.retrieval import Vector
from workers.embed.embedders.protocol import Text
from workers.embed.embedders.words import TOKENS

DIM = 256


class HashEmbedder:
    """Hashes a text's words and word pairs into its vector; meets `Embedder`."""

    name = "hash@1"
    dim = DIM
    vocab = 1 << 31  # any token id is hashed as a word
    tokens_max = 1 << 20

    def token_starts(self, text: str) -> Sequence[int]:
        """Return the starts of words and punctuation marks, one token each, in characters."""
        return [match.start() for match in TOKENS.finditer(text)]

    def embed(self, texts: Sequence[Text]) -> Vector:
        """Return unit vectors of square roots of counts, float32 (texts, DIM).

        Each feature has a sign, so that collisions cancel out on average.
        """
        rows = np.zeros((len(texts), DIM), np.float32)
        for row, text in zip(rows, texts, strict=True):
            for feature, count in _features(text).items():
                place = zlib.crc32(feature.encode(errors="surrogatepass"))
                row[place % DIM] += count**0.5 * (1 if place & 1 << 16 else -1)
            if not row.any():
                row[0] = 1.0  # a text without words needs a unit vector, too
            row /= np.linalg.norm(row)
        return rows


def _features(text: Text) -> Counter[str]:
    if isinstance(text, str):
        plain = unicodedata.normalize("NFKC", text).casefold()
        words = [word for word in TOKENS.findall(plain) if word.isalnum()]
    else:
        words = [f"#{token_id}" for token_id in text]
    return Counter(words) + Counter(f"{word} {next_word}" for word, next_word in pairwise(words))
