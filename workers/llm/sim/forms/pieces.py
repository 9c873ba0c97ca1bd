"""Lists what one step may add to a drawn text, bytes and words, and how likely each is. Pure."""

from string import ascii_letters, digits
from typing import Any

import numpy as np

from workers.models.sim import WORDS

PLAIN_WORDS = [word.encode() for word in WORDS if len(word) > 1]
# Bytes first, so that a byte is its own index.
PIECES = [*(bytes([byte]) for byte in range(256)), *PLAIN_WORDS, *(b" " + w for w in PLAIN_WORDS)]
END_PIECE = len(PIECES)  # the index of the end, for which the last share stands
STEPS_MAX = 4_000  # bytes and words of one text
LATE_STEPS = 60  # after which a text ends as soon as it can


def _shares(*, late: bool) -> Any:
    """Return how likely each piece is among those that may follow; shape (pieces + 1,)."""
    shares = np.full(END_PIECE + 1, 0.1)  # words, and what no row names
    shares[:256] = 1e-6  # bytes of other scripts, control characters, escapes
    rows = ((ascii_letters + digits + "\n -_.;/:{[", 0.1), ("eE", 0.02), (",}]@", 0.5), ('"', 20.0))
    for chars, share in rows:
        shares[list(chars.encode())] = share
    if late:
        shares[256:] = 1e-3
        shares[list(b"\n-_.,;/@:")] = 1.0
        shares[list(b"{[")] = 1e-4
        shares[[*b'"}]', END_PIECE]] = 1_000.0
    return shares


EARLY_SHARES, LATE_SHARES = _shares(late=False), _shares(late=True)
