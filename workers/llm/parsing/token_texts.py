"""The text of an answer, token by token, and the ids of its tool calls. Pure."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from schemas.records import Sampling
from workers.llm.stop_strings import StopText

KIMI: Final = "kimi_k2"  # the tool parser whose calls have ids of their own
_PRIMING_TOKENS = 16  # of the prompt: a decoder's spaces depend on the tokens before
_ID_CHARS, _MISTRAL_ID_CHARS = 24, 9  # templates of Mistral's models refuse other lengths
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class CallIds:
    """The ids of the tool calls of one answer, the same in every attempt."""

    def __init__(self, request_id: str, tool_parser: str) -> None:
        self._request_id = request_id
        self._keeps_own = tool_parser == KIMI  # the model reads its own ids in the next turn
        self._is_short = tool_parser == "mistral"

    def call_id(self, index: int, parser_id: str) -> str:
        """Return the id of the call with this index; `parser_id` is the parser's own."""
        if self._keeps_own:
            return parser_id
        number = int.from_bytes(blake2b(f"{self._request_id}/{index}".encode()).digest()[:20])
        text = ""
        for _ in range(_MISTRAL_ID_CHARS if self._is_short else _ID_CHARS):
            number, digit = divmod(number, len(_ALPHABET))
            text += _ALPHABET[digit]
        return text if self._is_short else f"call_{text}"


class TokenTexts:
    """The text of an answer, token by token, without its stop string or end token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        sampling: Sampling,
        end_ids: frozenset[int],
        *,
        skips_special: bool,
        joins_added: bool,
    ) -> None:
        """Begin the text after a prompt. With `joins_added`, no spaces are between added tokens."""
        self._tokenizer, self._skips_special = tokenizer, skips_special
        self._stream = DecodeStream(
            ids=list(prompt[-_PRIMING_TOKENS:]), skip_special_tokens=skips_special
        )
        is_joined = joins_added and not skips_special
        self._added: Mapping[int, Any] = tokenizer.get_added_tokens_decoder() if is_joined else {}
        self._after_added = False
        self._min_tokens, self._include_stop = sampling.min_tokens, sampling.include_stop
        end_ids = frozenset() if sampling.ignore_eos else end_ids
        self._end_ids = end_ids | frozenset(sampling.stop_token_ids)
        self._stops = StopText(sampling.stop, include_stop=sampling.include_stop)

    def add(self, token_id: int, count: int) -> str:
        """Return the text that is certain after one more token, the answer's `count`-th."""
        may_stop = count > self._min_tokens
        if token_id in self._end_ids and may_stop and not self._include_stop:
            return ""
        return self._stops.feed(self._decode(token_id), may_stop=may_stop)

    def _decode(self, token_id: int) -> str:
        try:
            text = self._stream.step(self._tokenizer, token_id) or ""
        except Exception:  # `tokenizers` raises it for text that is not valid UTF-8
            self._stream = DecodeStream(skip_special_tokens=self._skips_special)
            text = self._stream.step(self._tokenizer, token_id) or ""
        if self._added:
            token = self._added.get(token_id)
            text = str(token.content) if token is not None and self._after_added else text
            self._after_added = token is not None
        return text

    def flush(self) -> str:
        """Return the text that was withheld, because it could have become a stop string."""
        return "" if self._stops.matched_stop else self._stops.flush()
