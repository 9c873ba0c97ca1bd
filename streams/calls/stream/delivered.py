"""The tokens and text of a stream so far: to compare repeated rows, and to resume elsewhere.

Attempts compute the same answer again, and small numeric differences in a batch can change a token.
So rows that a later attempt repeats are compared with the delivered ones. Each event id carries a
digest of everything its client has; any gateway can compute that digest again from the log.

The digest is CRC-32 over token ids and over text, joined by xor: it detects accidents. A client
that forges one only corrupts its own answer. Pure; belongs to one `Stream`.
"""

from array import array
from collections.abc import Sequence
from zlib import crc32

from schemas.rules.tokens import pack_tokens


class DeliveredAnswer:
    """Token ids and texts of one answer, from its start; the stream appends to both."""

    __slots__ = ("_ids_crc", "_ids_done", "_text_crc", "ids", "texts")

    def __init__(self) -> None:
        self.ids = array("q")
        self.texts: list[str] = []
        self._ids_done = 0  # number of ids that are in `_ids_crc`
        self._ids_crc = self._text_crc = 0

    def hand_out(self, text: str) -> None:
        """Add the next drained text, and all ids so far, to the digest."""
        count = len(self.ids)
        if count != self._ids_done:
            self._ids_crc = crc32(self.ids[self._ids_done :], self._ids_crc)
            self._ids_done = count
        if text:
            self._text_crc = crc32(_bytes(text), self._text_crc)

    def prefix(self, tokens: int, chars: int) -> "DeliveredAnswer":
        """Copy the first tokens and characters, as if none were handed out."""
        prefix = DeliveredAnswer()
        prefix.ids, prefix.texts = self.ids[:tokens], ["".join(self.texts)[:chars]]
        return prefix

    def is_prefix_of(self, longer: "DeliveredAnswer") -> bool:
        """Return whether the other answer is longer and continues this one."""
        is_shorter = len(self.ids) < len(longer.ids)
        return is_shorter and longer.differs(0, self.ids, 0, "".join(self.texts)) is None

    @property
    def digest(self) -> int:
        """Return the digest of all that was handed out."""
        return self._ids_crc ^ self._text_crc

    def packed(self) -> bytes:
        """Return the token ids as little-endian int32."""
        return pack_tokens(self.ids)

    def mark_resumed(self, chars: int) -> None:
        """Add to the digest the characters that another gateway has delivered."""
        self._text_crc = crc32(_bytes("".join(self.texts)[:chars]))

    def digest_of(self, tokens: int, chars: int) -> int:
        """Return the digest of the first tokens and characters."""
        return crc32(self.ids[:tokens]) ^ crc32(_bytes("".join(self.texts)[:chars]))

    def differs(
        self, first_seq: int, token_ids: Sequence[int], first_char: int, text: str
    ) -> int | None:
        """Return the number of the first token that differs, as far as both answers reach, or None.

        If only the text differs, it is the number of the first of these tokens.
        """
        old_ids = self.ids[first_seq : first_seq + len(token_ids)]
        if old_ids != array("q", token_ids[: len(old_ids)]):
            pairs = enumerate(zip(old_ids, token_ids, strict=False), first_seq)
            return next(seq for seq, (old_id, new_id) in pairs if old_id != new_id)
        old_text = "".join(self.texts)[first_char : first_char + len(text)]
        return None if text.startswith(old_text) else first_seq


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
