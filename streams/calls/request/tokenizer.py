"""Converts text to tokens, with the model's own chat template and tokenizer.

Prompts are tokenised only here. The module needs `schemas.model` but no torch. Rendering and
encoding are separate steps: the rendered text has marks around the last question, where passages
are inserted.
"""

import secrets
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from jinja2 import Template, TemplateError, nodes

from schemas.errors import ConfigError, InvalidRequest
from schemas.model.control_tokens import MARK
from schemas.model.files import (
    control_tokens_of,
    read_json,
    special_tokens_of,
    template_source_of,
)
from schemas.rules.tokens import pack_ranges
from streams.calls.request.check_process import CHECK_MS, CHECK_PROCESS
from streams.calls.request.model.chat_marks import ChatMarks
from streams.calls.request.model.encoder import Encoder, TooLong
from streams.calls.request.model.jinja_environment import make_environment

Message = Mapping[str, Any]
INLINE_CHARS_MAX: Final = 8_192  # half a millisecond; longer texts are tokenised in a thread
_MARK = f"\ufdd1{secrets.randbits(64)}\ufdd1"  # unguessable, so no message contains them
_OPEN = f"\ufdd2{secrets.randbits(64)}\ufdd2"


# Errors that a template raises for unexpected messages and variables.
_REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "self", "loop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """The input of a model's chat template."""

    messages: Sequence[Message] = ()
    tools: Sequence[Mapping[str, Any]] = ()  # in OpenAI's form
    variables: Mapping[str, Any] | None = None  # `chat_template_kwargs`
    add_generation_prompt: bool = True
    continues_last: bool = False  # the answer continues the last message

    @property
    def chars(self) -> int:
        """Return the length of all its texts together, in characters."""
        return _chars(self.messages) + _chars(self.tools) + _chars(self.variables)


class ChatTemplate:
    """A compiled template with the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = make_environment()
        try:
            self.tree = tree = environment.parse(source)
            self._template: Template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the model's chat template cannot be compiled: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._reserved = {*_RESERVED, *special_tokens, *environment.globals}
        attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
        attributes |= {node.value for node in tree.find_all(nodes.Const)}
        self.writes_tool_calls = "tool_calls" in attributes
        self.takes_text_arguments = any(map(_asks_for_text, tree.find_all(nodes.Test)))

    def render(self, chat: Chat) -> str:
        """Render the prompt's text. Raises InvalidRequest if the template refuses the messages, or
        if a variable has a name that the template reserves."""
        for name in chat.variables or ():
            if name in self._reserved:
                raise InvalidRequest(
                    f"chat_template_kwargs.{name}: the template's own name; leave it out",
                    f"chat_template_kwargs.{name}",
                )
        try:
            return self._template.render(
                **{
                    **self._special_tokens,
                    **(chat.variables or {}),
                    "messages": chat.messages,
                    "tools": chat.tools or None,
                    "documents": None,
                    "add_generation_prompt": chat.add_generation_prompt,
                }
            )
        except _REFUSALS as error:
            reason = str(error).replace(MARK, "")
            raise InvalidRequest(
                f"messages: the model's chat template refuses them: {reason}", "messages"
            ) from error


def _asks_for_text(test: nodes.Test) -> bool:
    """Return whether a test, as in `tool_call.arguments is string`, shows that arguments may be a
    text."""
    node = test.node
    is_arguments = isinstance(node, nodes.Getattr) and node.attr == "arguments"
    if isinstance(node, nodes.Getitem):
        is_arguments = isinstance(node.arg, nodes.Const) and node.arg.value == "arguments"
    return is_arguments and test.name in ("string", "mapping")


def _chars(value: Any) -> int:
    """Return the length of all texts in a JSON value together, in characters."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(name) + _chars(item) for name, item in value.items())
    return sum(map(_chars, value)) if isinstance(value, list | tuple) else 0


@dataclass(frozen=True, slots=True)
class MarkedPrompt:
    """The token ids of a chat; one of its messages is from `at` to `tail_at`."""

    ids: "array[int]"
    at: int
    tail_at: int


class Tokenizer:
    """The tokenizer of the served model. `encode` may be called from any thread."""

    def __init__(self, folder: Path, *, inline_chars: int = INLINE_CHARS_MAX) -> None:
        file = folder / "tokenizer.json"
        if not file.exists():
            raise ConfigError(
                f"{file}: no such file; the gateway needs a fast tokenizer (tokenizer.json)"
            )
        self._folder = folder
        self.encoder = Encoder(file, inline_chars=inline_chars)
        raw = self.encoder.raw
        self.control = control_tokens_of(folder, raw)
        source, special = template_source_of(folder), special_tokens_of(folder)
        self._template = self._marks = None
        if source is not None:
            self._template = template = ChatTemplate(source, special)
            self._marks = ChatMarks(self.control, template.tree, special)
        model = read_json(folder / "config.json")
        vocab = raw.get_vocab()
        self.vocab = max(max(vocab.values(), default=-1) + 1, int(model.get("vocab_size", 0)))
        self.token_chars_max = max(map(len, vocab), default=1)
        self.reserved = pack_ranges(self.control.ids, self.vocab)

    @property
    def writes_tool_calls(self) -> bool:
        """Return whether the model's template supports tool calls and their results."""
        return self._template is not None and self._template.writes_tool_calls

    @property
    def takes_text_arguments(self) -> bool:
        """Return whether the template accepts a tool call's arguments as a text, too."""
        return self._template is not None and self._template.takes_text_arguments

    def render(self, chat: Chat) -> str:
        """Render the prompt's text for a chat."""
        if self._template is None:
            raise InvalidRequest(
                "messages: the model has no chat template; use /v1/completions", "messages"
            )
        return self._template.render(chat)

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
        arguments = (str(self._folder), asdict(chat))
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
