"""Converts text to tokens, with the model's own chat template and tokenizer.

Prompts are tokenised only here. The module needs `schemas.model` but no torch. Rendering and
encoding are separate steps: the rendered text has marks around the last question, where passages
are inserted. Two libraries encode, and give the same ids. `fastokens` takes a fiftieth of the time,
releases the interpreter's lock, and creates no Python integers: 100 000 tokens take 2 to 5 ms. It
reads most byte-level BPE models. `tokenizers` reads all models, and has the vocabulary. It encodes
if `fastokens` does not accept a model or a text, or if a probe finds a difference between the two.
"""

import asyncio
import os
import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import fastokens  # type: ignore[import-untyped]  # ships no types
import tokenizers

from schemas.errors import ConfigError, InvalidRequest, TooManyRequests
from schemas.model.files import (
    control_tokens_of,
    read_json,
    special_tokens_of,
    template_source_of,
)
from schemas.rules.tokens import pack_ranges
from streams.calls.request.chat import Chat, ChatMarks, ChatTemplate
from streams.calls.request.check_process import CHECK_MS, CHECK_PROCESS

TOKENIZER_FILE: Final = "tokenizer.json"
INLINE_CHARS_MAX: Final = 8_192  # half a millisecond; longer texts are tokenised in a thread
_MARK = f"\ufdd1{secrets.randbits(64)}\ufdd1"  # unguessable, so no message contains them
_OPEN = f"\ufdd2{secrets.randbits(64)}\ufdd2"
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
        self.raw = tokenizers.Tokenizer.from_file(str(file))
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


@dataclass(frozen=True, slots=True)
class MarkedPrompt:
    """The token ids of a chat; one of its messages is from `at` to `tail_at`."""

    ids: "array[int]"
    at: int
    tail_at: int


class Tokenizer:
    """The tokenizer of one model. `encode` may be called from any thread."""

    def __init__(
        self,
        folder: Path,
        *,
        inline_chars: int = INLINE_CHARS_MAX,
        encoder: Encoder | None = None,
    ) -> None:
        """Load a model's tokenizer; `encoder` is one of the same tokenizer.json, to be shared."""
        file = folder / TOKENIZER_FILE
        if not file.exists():
            raise ConfigError(
                f"{file}: no such file; the gateway needs a fast tokenizer (tokenizer.json)"
            )
        self._folder = folder
        self.encoder = encoder or Encoder(file, inline_chars=inline_chars)
        raw = self.encoder.raw
        self.control = control_tokens_of(folder, raw)
        source, special = template_source_of(folder), special_tokens_of(folder)
        self.template: ChatTemplate | None = None
        self._marks: ChatMarks | None = None
        if source is not None:
            self.template = template = ChatTemplate(source, special)
            self._marks = ChatMarks(self.control, template.tree, special)
        model = read_json(folder / "config.json")
        vocab = raw.get_vocab()
        self.vocab = max(max(vocab.values(), default=-1) + 1, int(model.get("vocab_size", 0)))
        self.token_chars_max = max(map(len, vocab), default=1)
        self.reserved = pack_ranges(self.control.ids, self.vocab)

    def render(self, chat: Chat) -> str:
        """Render the prompt's text for a chat."""
        if self.template is None:
            raise InvalidRequest(
                "messages: the model has no chat template; use /v1/completions", "messages"
            )
        return self.template.render(chat)

    def pieces(self, chat: Chat) -> list[str]:
        """Return the prompt's text in pieces to be encoded one by one.

        Where a message spells a control token, it is cut within that name, so that it becomes plain
        text.
        """
        return self.control.pieces(self._render_prompt(self._mark_chat(chat)))

    def _mark_chat(self, chat: Chat) -> Chat:
        """Mark the texts of callers that may spell a control token; a model without a template
        needs no marks."""
        marks = self._marks
        if marks is None:
            return chat
        return replace(
            chat,
            messages=[marks.message(message) for message in chat.messages],
            tools=marks.value(chat.tools),
            variables=marks.value(chat.variables),
        )

    def _render_prompt(self, chat: Chat) -> str:
        """Render a prompt; it ends with the last message's text if the answer continues it."""
        if not chat.continues_last:
            return self.render(chat)
        *earlier, last = chat.messages
        opened = {**last, "content": f"{last['content']}{_OPEN}"}
        text, *rest = self.render(replace(chat, messages=[*earlier, opened])).split(_OPEN)
        if len(rest) != 1:
            raise InvalidRequest(
                "continue_final_message: the model's chat template has no single place for the "
                "last message, so nothing can go on with it; leave it out",
                "continue_final_message",
            )
        return text

    async def encode_chat(
        self,
        chat: Chat,
        *,
        check_chars: Callable[[int], None],
        limit_ms: int = CHECK_MS,
        tenant: str = "",
    ) -> "array[int]":
        """Return the token ids of a chat; only the template writes control tokens, never a message
        or a variable, even if their text is spelled like one.

        `check_chars` raises if a prompt has too many characters, before it is encoded. A long chat
        is cut, rendered and encoded in a thread, so that streams continue, and a very long one in
        another process, which can be ended. Raises InvalidRequest, and TooManyRequests if too many
        wait.
        """
        chars = chat.chars

        def ids() -> "array[int]":
            pieces = self.pieces(chat)
            check_chars(sum(map(len, pieces)))
            return self.encoder.ids(pieces, in_thread=True)

        with suppress(TooLong):
            return await self.encoder.offload(ids, chars, tenant)
        check_chars(chars)
        arguments = (str(self._folder), asdict(replace(chat, turns=())))
        answer = await CHECK_PROCESS.ask("chat", *arguments, limit_ms=limit_ms, tenant=tenant)
        if "refused" in answer:
            raise InvalidRequest(*answer["refused"])
        return array("i", answer["ids"])

    async def encode_marked_chat(
        self, chat: Chat, marked: int, *, check_chars: Callable[[int], None], tenant: str = ""
    ) -> MarkedPrompt:
        """Return the token ids of a chat in which one message's text is encoded separately, so that
        others can be inserted around it. Raises the errors of `encode_chat`, and InvalidRequest if
        the template does not write that message exactly once, or if the chat is very long."""
        check_chars(chars := chat.chars)

        def prompt() -> MarkedPrompt:
            marked_chat = self._mark_chat(chat)
            messages = list(marked_chat.messages)
            content = f"{_MARK}{messages[marked]['content']}{_MARK}"
            messages[marked] = {**messages[marked], "content": content}
            parts = self._render_prompt(replace(marked_chat, messages=messages)).split(_MARK)
            if len(parts) != 3:
                raise InvalidRequest(
                    "messages: the model's chat template has no single place for the last user "
                    "message, so nothing can be looked up for it; leave retrieval out",
                    "messages",
                )
            check_chars(sum(map(len, parts)))
            return self._prompt(parts)

        try:
            return await self.encoder.offload(prompt, chars, tenant)
        except TooLong:
            raise InvalidRequest(
                f"messages: expected at most {self.encoder.thread_chars_max} characters with "
                f"retrieval, fewer of a text that has bytes without a token, found {chars}",
                "messages",
            ) from None

    def _prompt(self, parts: Sequence[str]) -> MarkedPrompt:
        pieces = self.control.pieces
        before, within, after = (self.encoder.ids(pieces(p), in_thread=True) for p in parts)
        at = len(before)
        return MarkedPrompt(before + within + after, at, at + len(within))

    async def encode(
        self, text: str, *, add_special_tokens: bool, limit_ms: int = CHECK_MS, tenant: str = ""
    ) -> "array[int]":
        """Return the token ids of a text. A long text is encoded in a thread, so that streams
        continue, and a very long one in another process, which can be ended. Raises InvalidRequest
        after the limit."""

        def ids() -> "array[int]":
            return self.encoder.ids([text], add_special_tokens=add_special_tokens, in_thread=True)

        with suppress(TooLong):
            return await self.encoder.offload(ids, len(text), tenant)
        arguments = (str(self._folder), text, add_special_tokens)
        ids_made = await CHECK_PROCESS.ask("encode", *arguments, limit_ms=limit_ms, tenant=tenant)
        return array("i", ids_made)

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return self.encoder.raw.decode(token_ids, skip_special_tokens=False)

    def token_text(self, token_id: int) -> str | None:
        """Return a token's text in the vocabulary, or None."""
        return self.encoder.raw.id_to_token(token_id)
