"""Converts pieces of text to packed token ids, with one of two libraries that give the same ids.

`fastokens` takes a fiftieth of the time, releases the interpreter's lock, and creates no Python
integers: 100 000 tokens take 2 to 5 ms. It reads most byte-level BPE models. `tokenizers` reads all
models, and has the vocabulary. It encodes if `fastokens` does not accept a model or a text, or if a
probe finds a difference between the two. This module knows nothing of chats.
"""

import asyncio
import os
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import fastokens  # type: ignore[import-untyped]  # ships no types
from tokenizers import Tokenizer

from schemas.errors import TooManyRequests

# Without thread pools: they would block this thread until the machine has time for them.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")

Made = TypeVar("Made")
# Limits of texts that a thread encodes: most take a few milliseconds, the worst about a second.
_FAST_CHARS_MAX, _PLAIN_CHARS_MAX = 1 << 20, 1 << 18
# of a tenant's texts that wait for the thread, which serves all tenants
_WAITING_CHARS_MAX = 1 << 22
_PROBE = (
    "Hello, WORLD!  It's 3.14159 = \u03c0,\r\n\r\n\tisn't it?\u00a0   x_1+=(y**2);//\n  \n#\n"
    "na\u00efve nai\u0308ve \ufb01 \u0130\u017f \u4f60\u597d\u3002 \u3053\u3093\u306b\u3061\u306f "
    "\u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947 \U0001f600"
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301\u0301\u0301 12345678901234567890 \x00\x7f "
)


class TooLong(Exception):
    """A text would take this process too long to encode."""


class Encoder:
    """Converts texts into token ids of one model. May be called from any thread."""

    def __init__(self, file: Path, *, inline_chars: int = 0) -> None:
        self._inline_chars = inline_chars
        self.raw = Tokenizer.from_file(str(file))
        self.raw.no_padding()
        self.raw.no_truncation()
        self._fast = _fast_one(file)
        if not all(map(self._is_agreed, self._probes())):
            self._fast = None
        is_fast = self._fast is not None
        self.thread_chars_max = _FAST_CHARS_MAX if is_fast else _PLAIN_CHARS_MAX
        # `fastokens` caches up to 90 MB of words per thread; one thread is enough.
        self._pool = ThreadPoolExecutor(1, "tokens") if is_fast else None
        self._waiting_chars: Counter[str] = Counter()  # by tenant

    def _probes(self) -> list[str]:
        names = [token.content for token in self.raw.get_added_tokens_decoder().values()]
        return [_PROBE, " ".join(names), "x".join(names)]

    def _is_agreed(self, text: str) -> bool:
        """Return whether both libraries give the same tokens for a text."""
        return all(
            self.ids([text], add_special_tokens=special) == self._plain([text], special)
            for special in (False, True)
        )

    def ids(
        self, pieces: Sequence[str], *, add_special_tokens: bool = False, in_thread: bool = False
    ) -> "array[int]":
        """Return the token ids of all pieces in order. Raises TooLong if `in_thread` and a long
        text has bytes that the fast library refuses."""
        if self._fast is not None:
            try:
                packed, _ = self._fast.encode_batch_flat(
                    pieces, add_special_tokens=add_special_tokens
                )
                return array("i", packed)
            except ValueError:  # a byte that the vocabulary lacks
                if in_thread and sum(map(len, pieces)) > _PLAIN_CHARS_MAX:
                    raise TooLong from None
        return self._plain(pieces, add_special_tokens)

    async def offload(self, make: Callable[[], Made], chars: int, tenant: str = "") -> Made:
        """Return the result of `make` for a text of `chars` characters; long texts use a thread, so
        that streams continue. Raises TooLong, and TooManyRequests if too many characters of a
        tenant wait."""
        if chars > self.thread_chars_max:
            raise TooLong
        if chars <= self._inline_chars:
            return make()
        waiting = self._waiting_chars[tenant]
        if waiting and waiting + chars > _WAITING_CHARS_MAX:
            raise TooManyRequests(f"prompts of {waiting} characters wait to be encoded; try again")
        self._waiting_chars[tenant] += chars
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, make)
        finally:
            self._waiting_chars[tenant] -= chars
            if not self._waiting_chars[tenant]:
                del self._waiting_chars[tenant]

    def _plain(self, pieces: Sequence[str], special: bool) -> "array[int]":
        ids = array("i")
        for piece in pieces:
            # The fast method does not compute offsets in the text; it takes batches only.
            (encoding,) = self.raw.encode_batch_fast([piece], add_special_tokens=special)
            ids.extend(encoding.ids)
        return ids


def _fast_one(file: Path) -> Any:
    """Return the fast library's tokenizer, or None if it cannot read this model."""
    try:
        fast = fastokens.Tokenizer.from_file(str(file))
    except ValueError:
        return None
    fast.no_padding()
    fast.no_truncation()
    return fast
