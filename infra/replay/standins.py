"""Makes substitutes for words that a recording leaves out, of the same lengths and equalities.

Tokens become digests of all tokens up to there, keyed by a salt that is never stored. So prompts
share exactly as long a prefix as before, and no reader can test guesses of what they said. Texts
become as many bytes of x, names become digests. Called by `redacting.py`.
"""

from hashlib import blake2b

_TOKEN_BYTES = 4
_NAME_CHARS = 16
_HASH_BYTES = 8


class StandIns:
    """Substitutes under one salt; `cell_tokens` is the granularity at which prompts differ."""

    def __init__(self, salt: bytes, cell_tokens: int) -> None:
        self._salt, self._cell_tokens = salt, cell_tokens

    def tokens(self, packed: bytes) -> bytes:
        """Return zeros, with a digest of all tokens so far as the last token of each whole cell."""
        cell_bytes = self._cell_tokens * _TOKEN_BYTES
        digest = blake2b(key=self._salt, digest_size=_TOKEN_BYTES)
        stand_in = bytearray(len(packed))
        for end in range(cell_bytes, len(packed) + 1, cell_bytes):
            digest.update(packed[end - cell_bytes : end])
            stand_in[end - _TOKEN_BYTES : end] = digest.copy().digest()
            stand_in[end - 1] &= 0x7F  # token ids are not negative
        return bytes(stand_in)

    def name(self, name: str) -> str:
        """Return the substitute of a name."""
        return blake2b(name.encode(), key=self._salt, digest_size=_NAME_CHARS // 2).hexdigest()

    def block(self, value: int) -> int:
        """Return the substitute of a block hash whose prompt is unknown."""
        digest = blake2b(value.to_bytes(_HASH_BYTES), key=self._salt, digest_size=_HASH_BYTES)
        return int.from_bytes(digest.digest())


def blank_text(text: str) -> str:
    """Return as many bytes of x as the text has."""
    return "x" * len(text.encode())
