"""Makes prompts of words that are one token each, so words count about as many tokens."""

import random
from collections.abc import Sequence

from tokenizers import Tokenizer

MODEL_HELP = "a wheel's name, tiny, a folder, or a name on a model hub"
_WORD_CHARS = range(3, 9)


def plain_words(tokenizer: Tokenizer) -> list[str]:
    """Return the words that are one token each after a space."""
    words = [token[1:] for token in tokenizer.get_vocab() if token.startswith("Ġ")]
    return sorted(w for w in words if w.isascii() and w.islower() and len(w) in _WORD_CHARS)


def draw_prompt(rng: random.Random, words: Sequence[str], count: int) -> str:
    """Return a prompt of `count` random words."""
    return " ".join(rng.choices(words, k=count))
