"""Parses answers with vLLM's parsers: reasoning, content and tool calls, token by token.

vLLM composes a parser for each model from a reasoning parser and a tool parser, which read text
and token ids. This module feeds it single tokens, with text that it decodes itself, so that the
deltas depend on the tokens alone and not on how the engine groups them or withholds their text.
Only `load_parsers` imports it, because it imports vLLM.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import Parser, ParserManager
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers.hf import CachedHfTokenizer
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

from schemas.errors import ConfigError, InvalidAnswer, InvalidRequest
from schemas.model.parser_rules import NONE
from schemas.model.parsers import ParserNames
from schemas.records import (
    AnswerDelta,
    DeltaKind,
    Parsing,
    Sampling,
    Work,
)
from workers.llm.parsing.blanks import BlankContent
from workers.llm.parsing.forms import params_fields, structured_of
from workers.llm.parsing.parsers import ParsedEnd
from workers.llm.parsing.token_texts import KIMI, CallIds, TokenTexts

logger = logging.getLogger(__name__)
# They log each token that they cannot read yet, with its traceback.
logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
# Parsers that lose or garble calls if they get token by token (vLLM 0.32); they read whole answers.
_WHOLE_ONLY = frozenset({"functiongemma", "jamba", "phi4_mini_json"})
# Many parsers read all arguments of a call again for each token. So tokens of long arguments wait
# for each other, one more for each of these many characters; but not tokens that may end a call, as
# older parsers may miss what follows it in the same piece.
_CHARS_PER_WAITING_TOKEN = 512
_STRUCTURE = frozenset("<>{}[]()|")


class VllmParsers:
    """vLLM's parsers of one model."""

    def __init__(self, folder: Path, model_name: str, names: ParserNames) -> None:
        """Load the tokenizer of the model in `folder`; raises ConfigError."""
        self._names, self._model_name = names, model_name
        self._tokenizer = CachedHfTokenizer.from_pretrained(folder)
        self._end_ids = _end_ids(folder, self._tokenizer)
        try:
            parser_class = ParserManager.get_parser(
                tool_parser_name=None if names.tool == NONE else names.tool,
                reasoning_parser_name=None if names.reasoning == NONE else names.reasoning,
                enable_auto_tools=True,
                model_name=model_name,
                is_harmony=names.tool == "openai",
                tokenizer=self._tokenizer,
            )
        except (TypeError, RuntimeError, ValueError, ImportError) as error:
            raise ConfigError(
                f"model.tool_parser {names.tool}, model.reasoning_parser {names.reasoning}: {error}"
            ) from error
        assert parser_class is not None, "one of the names is set"
        self._parser_class: type[Parser] = parser_class

    def begin(self, work: Work, prompt: Sequence[int]) -> "TokenParser":
        """Return a parser for an answer, which has to take the answer's prior tokens first."""
        parsing = work.parsing
        assert parsing is not None
        own_prompt = list(prompt[: len(prompt) - work.prior_tokens])
        try:
            request = _request(parsing, work.sampling, self._model_name)
            parser = self._parser(request, own_prompt, parsing.prior_calls)
            request = self._adjusted(request, parser)
        except InvalidRequest:
            raise
        except Exception as error:  # parsers of many authors read the tools
            raise InvalidRequest(f"tools: {type(error).__name__}: {str(error)[:500]}") from error
        return TokenParser(
            parser,
            lambda: self._parser(request, own_prompt, parsing.prior_calls),
            request,
            replace(
                work.sampling,
                skip_special_tokens=request.skip_special_tokens,
                structured=structured_of(request.structured_outputs),
            ),
            own_prompt,
            TokenTexts(
                self._tokenizer._tokenizer,  # noqa: SLF001  # that of the package `tokenizers`
                own_prompt,
                work.sampling,
                self._end_ids,
                skips_special=request.skip_special_tokens,
                joins_added=not request.spaces_between_special_tokens,
            ),
            CallIds(work.request_id, self._names.tool),
            reads_whole=self._names.tool in _WHOLE_ONLY and bool(request.tools),
        )

    def _adjusted(self, request: ChatCompletionRequest, parser: Parser) -> ChatCompletionRequest:
        """Return the call with the form of the answer: one for calls, or for either calls or an
        answer in the form that the call asks for. Raises InvalidRequest if there is none."""
        form = request.structured_outputs
        is_either = bool(request.tools) and request.tool_choice == "auto" and form is not None
        if is_either:
            # Otherwise it has no form for calls.
            parser.tool_strict_level = ToolStrictLevel.FUNCTION
        request = parser.adjust_request(request)
        if is_either and request.structured_outputs == form:
            raise InvalidRequest(
                f"response_format: vLLM's parser {self._names.tool} has no grammar for calls of "
                "tools, so the form would leave no room for them; leave out one of both",
                "response_format",
            )
        return request

    def _parser(
        self, request: ChatCompletionRequest, prompt: list[int], prior_calls: int
    ) -> Parser:
        parser = self._parser_class(
            self._tokenizer, request.tools, chat_template_kwargs=request.chat_template_kwargs
        )
        parser.set_prompt_token_ids(prompt)
        if self._names.tool == KIMI:
            state = parser._stream_state  # noqa: SLF001  # its ids count the conversation's calls
            state.tool_call_id_type = KIMI
            state.history_tool_call_cnt = prior_calls
            state.history_tool_call_cnt_initialized = True
        return parser


class TokenParser:
    """The parser of one answer; it implements `AnswerParser`.

    Some parsers miss calls in single tokens. If no call was found by the end, or with `reads_whole`
    in any case, another parser reads the whole answer at its end.
    """

    def __init__(
        self,
        parser: Parser,
        another_parser: Callable[[], Parser],
        request: ChatCompletionRequest,
        sampling: Sampling,
        prompt: list[int],
        text: TokenTexts,
        call_ids: CallIds,
        *,
        reads_whole: bool,
    ) -> None:
        self.sampling = sampling
        self._parser, self._request, self._prompt = parser, request, prompt
        self._another_parser, self._reads_whole = another_parser, reads_whole
        self._pieces: list[str] = []  # of the text
        self._waiting_text, self._waiting_ids = "", list[int]()
        self._chars_in_call = 0  # of the arguments that are being written
        self._is_structured = not parser._engine_based  # noqa: SLF001  # it reads no larger pieces
        self._text, self._call_ids = text, call_ids
        self._blanks = BlankContent() if request.tools else None
        self._token_ids: list[int] = []
        self._arguments: dict[int, str] = {}  # by the index of the call

    @property
    def binds_reasoning(self) -> bool:
        """Return whether the form binds the reasoning too, and not only what follows it."""
        return self._request.resolve_reasoning_ended(None, self._prompt) is True

    @property
    def thinking_end(self) -> str:
        """Return the text that ends reasoning; empty if the model or its parser has none."""
        reasoning_parser = self._parser.reasoning_parser
        return (reasoning_parser and reasoning_parser.reasoning_end_str) or ""

    def feed(self, token_ids: Sequence[int]) -> list[AnswerDelta]:
        """Take the next tokens; return their deltas."""
        deltas: list[AnswerDelta] = []
        for token_id in token_ids:
            self._token_ids.append(token_id)
            text = self._text.add(token_id, len(self._token_ids))
            self._pieces.append(text)
            if not self._reads_whole:
                self._waiting_text += text
                self._waiting_ids.append(token_id)
                if self._is_due(text):
                    deltas += self._parse_waiting()
        return deltas if self._blanks is None else self._blanks.take(deltas)

    def _is_due(self, text: str) -> bool:
        """Return whether the tokens that wait are parsed now; depends on the answer alone."""
        tokens_max = 1 + self._chars_in_call // _CHARS_PER_WAITING_TOKEN
        may_end = self._is_structured and not _STRUCTURE.isdisjoint(text)
        return may_end or len(self._waiting_ids) >= tokens_max

    def _parse_waiting(self, rest: str = "", *, finished: bool = False) -> list[AnswerDelta]:
        text, token_ids = self._waiting_text + rest, self._waiting_ids
        self._waiting_text, self._waiting_ids = "", []
        deltas = self._parse(text, token_ids, finished=finished)
        for delta in deltas:
            is_call = delta.kind is DeltaKind.CALL
            earlier_chars = 0 if delta.name else self._chars_in_call
            self._chars_in_call = earlier_chars + len(delta.text) if is_call else 0
        return deltas

    def _parse(
        self, text: str, token_ids: list[int], *, finished: bool = False
    ) -> list[AnswerDelta]:
        try:
            message = self._parser.parse_delta(
                text, token_ids, self._request, self._prompt, finished=finished
            )
        except Exception as error:  # parsers of many authors read what a model writes
            raise InvalidAnswer(
                f"the parser failed at token {len(self._token_ids)} of the answer: "
                f"{type(error).__name__}: {str(error)[:500]}"
            ) from error
        if message is None:
            return []
        deltas = []
        seq = len(self._token_ids)
        if message.reasoning:
            deltas.append(AnswerDelta(seq=seq, kind=DeltaKind.REASONING, text=message.reasoning))
        if message.content:
            deltas.append(AnswerDelta(seq=seq, kind=DeltaKind.CONTENT, text=message.content))
        for call in message.tool_calls:
            name = (call.function and call.function.name) or ""
            arguments = (call.function and call.function.arguments) or ""
            deltas += self._call(seq, call.index, name, arguments, call.id or "")
        return deltas

    def _call(
        self, seq: int, index: int, name: str, arguments: str, own_id: str
    ) -> list[AnswerDelta]:
        if index and not self._request.parallel_tool_calls:
            return []
        is_new = index not in self._arguments
        if not is_new and not arguments:
            return []
        self._arguments[index] = self._arguments.get(index, "") + arguments
        return [
            AnswerDelta(
                seq=seq,
                kind=DeltaKind.CALL,
                text=arguments,
                index=index,
                call_id=self._call_ids.call_id(index, own_id) if is_new else "",
                name=name if is_new else "",
            )
        ]

    def finish(self, finish_reason: str) -> ParsedEnd:
        """End the answer; also return calls and arguments that were read and not returned."""
        rest = self._text.flush()
        self._pieces.append(rest)
        deltas: list[AnswerDelta] = []
        if not self._reads_whole:
            deltas += self._parse_waiting() if self._waiting_ids else ()
            deltas += self._parse_waiting(rest, finished=True)
        deltas += self._rest_of_arguments()
        if self._reads_whole or (self._request.tools and not self._arguments):
            deltas += self._missed_parts()
        if self._blanks is not None:
            deltas = self._blanks.take(deltas) + self._blanks.flush(len(self._token_ids))
        is_named = not isinstance(self._request.tool_choice, str | None)
        if self._arguments and finish_reason == "stop" and not is_named:
            finish_reason = "tool_calls"
        reasoning_tokens = self._parser.count_reasoning_tokens(self._token_ids)
        return ParsedEnd(deltas, finish_reason, reasoning_tokens)

    def _missed_parts(self) -> list[AnswerDelta]:
        """Return the calls of the whole answer; with `reads_whole`, also all else that it has."""
        parser, seq = self._another_parser(), len(self._token_ids)
        try:
            reasoning, content, calls = parser.parse(
                "".join(self._pieces),
                self._request,
                enable_auto_tools=True,
                model_output_token_ids=self._token_ids,
            )
        except Exception:  # the parsers that get tokens have read all the same
            logger.exception("a parser cannot read a whole answer of %d tokens", seq)
            return []
        deltas: list[AnswerDelta] = []
        if self._reads_whole:
            texts = ((DeltaKind.REASONING, reasoning), (DeltaKind.CONTENT, content))
            deltas += [AnswerDelta(seq=seq, kind=kind, text=text) for kind, text in texts if text]
        for index, call in enumerate(calls or ()):
            deltas += self._call(seq, index, call.name, call.arguments, call.id or "")
        return deltas

    def _rest_of_arguments(self) -> list[AnswerDelta]:
        tool_parser = self._parser.tool_parser
        calls = [] if tool_parser is None else tool_parser.prev_tool_call_arr
        last = len(calls) - 1
        if last not in self._arguments:
            return []
        arguments = calls[last].get("arguments", {})
        whole = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
        earlier = self._arguments[last]
        if not whole.startswith(earlier) or whole == earlier:
            return []
        return self._call(len(self._token_ids), last, "", whole[len(earlier) :], "")


def _end_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Return the model's end-of-sequence tokens, from its tokenizer and generation settings."""
    ids = {tokenizer.eos_token_id}
    file = folder / "generation_config.json"
    if file.is_file():
        end_ids = json.loads(file.read_text()).get("eos_token_id")
        ids.update(end_ids if isinstance(end_ids, list) else [end_ids])
    return frozenset(token_id for token_id in ids if token_id is not None)


def _request(parsing: Parsing, sampling: Sampling, model: str) -> ChatCompletionRequest:
    """Return the call as vLLM's parsers read it; the messages do not matter to them."""
    fields: dict[str, Any] = {}
    choice = parsing.tool_choice
    if parsing.tools:
        fields = {
            "tools": json.loads(parsing.tools),
            "tool_choice": json.loads(choice) if choice.startswith("{") else choice,
            "parallel_tool_calls": parsing.parallel_tool_calls,
        }
    # An answer that must be a call is none in another form.
    structured = sampling.structured if not parsing.tools or choice == "auto" else None
    form = None if structured is None else StructuredOutputsParams(**params_fields(structured))
    return ChatCompletionRequest(
        messages=[{"role": "user", "content": ""}],
        model=model,
        include_reasoning=parsing.include_reasoning,
        chat_template_kwargs=json.loads(parsing.template_kwargs or "null"),
        skip_special_tokens=sampling.skip_special_tokens,
        structured_outputs=form,
        **fields,
    )
