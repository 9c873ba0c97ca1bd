"""A chat as the input of the model's template: its messages, tools and variables, and the template.

If the template supports tool calls and their results in a history, it gets them in OpenAI's form.
Other templates get them as text, in the form that many models were trained with. `ChatMarks` marks
the texts of callers, so that they name no control token (`schemas.model`). A role may select tokens
of the template, which some templates compose from it (`'<|' + role + '|>'`). An answer in the
history may contain names that the template searches for in answers, such as `</think>`, unless they
are special tokens. All other texts are plain text.
"""

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Template, TemplateError, nodes

from schemas.errors import ConfigError, InvalidRequest
from schemas.model.control_tokens import MARK, ControlTokens, Names
from streams.calls.errors import shorten
from streams.calls.request.body import Message, TemplateFields
from streams.calls.request.jinja_environment import make_environment

_TEXT_PARTS = {  # by type: the field with the text
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
_LEFT_OUT_PARTS = ("thinking", "reasoning")  # of earlier answers
_RESULT, _RESULT_BEFORE = "tool", "function"  # roles of a tool's result, new and old

_DEPTH_MAX = 100  # depth of a call's arguments

Json = dict[str, Any]
_LOOKING = set(  # methods of strings that search
    "split rsplit partition rpartition replace startswith endswith find rfind index rindex count "
    "strip lstrip rstrip removeprefix removesuffix".split()
)
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

    messages: Sequence[Mapping[str, Any]] = ()
    # the messages before their calls became text, if the template knows no calls
    turns: Sequence[Mapping[str, Any]] = field(default=(), repr=False, compare=False)
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


def chat_of(
    body: TemplateFields,
    messages: Sequence[Message],
    template: ChatTemplate | None,
    tools: Sequence[Json] = (),
) -> Chat:
    """Return the messages of a body, with its fields for the template; raises InvalidRequest.

    `tools` are those that the template shows to the model.
    """
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message: expected one of continue_final_message and "
            "add_generation_prompt, found both",
            "continue_final_message",
        )
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
        variables.setdefault("enable_thinking", body.reasoning_effort != "none")
    writes_calls = template is not None and template.writes_tool_calls
    keeps_digits = not writes_calls or (template is not None and template.takes_text_arguments)
    plain = [_plain(message, f"messages.{i}", keeps_digits) for i, message in enumerate(messages)]
    _check_call_ids(plain)
    return Chat(
        messages=plain if writes_calls else _in_words(plain),
        turns=plain,
        tools=tools,
        variables=variables,
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        continues_last=continues,
    )


def _plain(message: Message, where: str, keeps_digits: bool) -> Json:
    """Return a message as templates take it.

    Other fields are ignored, because clients send back whatever an answer of any server had. Raises
    InvalidRequest for a message without anything to read.
    """
    content, extras = message.content, message.model_extra or {}
    calls = _calls(message, where, keeps_digits)
    if content is None and message.role == "assistant":
        content = extras.get("refusal")
        if not isinstance(content, str | None):
            raise InvalidRequest(
                f"{where}.refusal: expected a string, found {shorten(content)}", f"{where}.refusal"
            )
    elif content is None and (unread_fields := [name for name, value in extras.items() if value]):
        raise InvalidRequest(
            f"{where}.content: required, but missing; {unread_fields[0][:80]!r} is not read",
            f"{where}.content",
        )
    role = {"developer": "system", _RESULT_BEFORE: _RESULT}.get(message.role, message.role)
    fields: Json = {"role": role, "content": _content(content, f"{where}.content")}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if calls:
        fields["tool_calls"] = calls
    if message.role == "assistant":  # clients send the reasoning back under one of two names
        reasoning = extras.get("reasoning") or extras.get("reasoning_content")
        if isinstance(reasoning, str):
            fields |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return fields


def _check_call_ids(messages: Sequence[Json]) -> None:
    """Raise InvalidRequest for a result of a call that no earlier message has."""
    call_ids: set[Any] = set()
    for i, message in enumerate(messages):
        call_ids.update(call.get("id") for call in message.get("tool_calls", ()))
        call_id = message.get("tool_call_id")
        is_unknown = call_id not in call_ids and None not in call_ids
        if call_id is not None and message["role"] == _RESULT and is_unknown:
            raise InvalidRequest(
                f"messages.{i}.tool_call_id: expected the id of a tool call in an earlier message, "
                f"found {shorten(call_id)}",
                f"messages.{i}.tool_call_id",
            )


def _content(content: str | Sequence[Json] | None, where: str) -> str:
    """Return the content as text; parts are joined by line breaks."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type")
        if kind in _LEFT_OUT_PARTS:
            continue
        field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if field is None:
            raise InvalidRequest(
                f"{where}.{i}.type: expected text, found {shorten(kind)}; only text is served",
                f"{where}.{i}.type",
            )
        if not isinstance(part.get(field), str):
            raise InvalidRequest(f"{where}.{i}.{field}: expected a string", f"{where}.{i}.{field}")
        texts.append(part[field])
    return "\n".join(texts)


def _calls(message: Message, where: str, keeps_digits: bool) -> list[Json]:
    """Return an assistant's tool calls, with their arguments as objects if possible."""
    if message.function_call is not None:
        function = _function_call(message.function_call, where, keeps_digits)
        return [{"type": "function", "function": function}]
    calls = []
    for i, call in enumerate(message.tool_calls or ()):
        kind = call.get("type") or "function"
        called = call.get(kind) if isinstance(kind, str) else None
        function = _function_call(called, f"{where}.tool_calls.{i}", keeps_digits)
        calls.append({"id": call.get("id"), "type": "function", "function": function})
    return calls


def _function_call(function: Any, where: str, keeps_digits: bool) -> Json:
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(
            f"{where}: expected a function with a name, found {shorten(function)}", where
        )
    arguments = function.get("arguments", function.get("input"))  # `input` for custom tools
    if isinstance(arguments, str):
        arguments = _read(arguments, keeps_digits)
    return {"name": function["name"], "arguments": {} if arguments is None else arguments}


def _read(arguments: str, keeps_digits: bool) -> Any:
    """Parse the JSON text of arguments. Returns the text itself if it is nested too deeply or no
    JSON, as models may write, and, if `keeps_digits`, if a float would be written with other
    digits."""
    try:
        value = json.loads(arguments or "{}", parse_float=_as_written if keeps_digits else float)
    except (ValueError, RecursionError):
        return arguments
    return arguments if _is_deeper(value, _DEPTH_MAX) else value


def _as_written(digits: str) -> float:
    if repr(number := float(digits)) != digits:
        raise ValueError("another text stands for that float")
    return number


def _is_deeper(value: Any, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not depth or any(_is_deeper(child, depth - 1) for child in inner)


def _in_words(messages: Sequence[Json]) -> list[Json]:
    """Write tool calls and results as text, for a template without tools. Calls are added to the
    text before them. Results become a message of the user, joined with the user's next message."""
    plain_messages: list[Json] = []
    joins = False  # whether the last message has results
    for message in messages:
        text, is_result = message["content"], message["role"] == _RESULT
        if is_result:
            text = f"<tool_response>\n{text}\n</tool_response>"
        for call in message.get("tool_calls", ()):
            text += f"\n<tool_call>\n{_spell(**call['function'])}\n</tool_call>"
        role = "user" if is_result else message["role"]
        if joins and role == "user":
            plain_messages[-1] = {
                **plain_messages[-1],
                "content": f"{plain_messages[-1]['content']}\n{text}",
            }
            joins = is_result
            continue
        plain = {"role": role, "content": text.lstrip("\n") if "tool_calls" in message else text}
        fields = () if is_result else ("name", "reasoning", "reasoning_content")
        plain |= {name: message[name] for name in fields if name in message}
        plain_messages.append(plain)
        joins = is_result
    return plain_messages


def _spell(name: str, arguments: Any) -> str:
    """Write a call as JSON; arguments that are a text of JSON stay as they are."""
    written = _json(arguments)
    if isinstance(arguments, str) and arguments.lstrip()[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):
            json.loads(arguments)
            written = arguments
    return f'{{"name": {_json(name)}, "arguments": {written}}}'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class ChatMarks:
    """Marks the texts of callers in the chats of one model."""

    def __init__(
        self, control: ControlTokens, template: nodes.Template, special: Mapping[str, str]
    ) -> None:
        """Analyse a template. `special` has the special tokens' names by their use, such as
        `eos_token`."""
        texts = {data.data for data in template.find_all(nodes.TemplateData)}
        texts |= set(_constants(template))
        sought = set(_search_operands(template))
        in_answers = {
            name
            for name in control.names - control.special_names
            if any(name in text for text in sought)
        }
        composed = {name: set(_composed_words(name, texts)) for name in control.names}
        template_words = filter(
            _is_word, texts | {node.attr for node in template.find_all(nodes.Getattr)}
        )
        self._own_words = {*template_words} - control.names  # that the template compares with
        self._names, self._names_in_answers = control.without(()), control.without(in_answers)
        self._words = set[str]().union(*composed.values()) - self._own_words
        ends = control.names.intersection(special.values())
        self._no_roles = set[str]().union(*(composed[name] for name in ends))

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Mark the texts of a message."""
        role = message["role"]
        names = self._names_in_answers if role == "assistant" else self._names
        marked = {field: self._mark_value(value, names) for field, value in message.items()}
        return {**marked, "role": self._mark(role, self._names, self._no_roles)}

    def value(self, value: Any) -> Any:
        """Mark the texts in tools or variables."""
        return self._mark_value(value, self._names)

    def _mark_value(self, value: Any, names: Names) -> Any:
        if isinstance(value, str):
            return self._mark(value, names, self._words)
        if isinstance(value, Mapping):
            return {
                self._mark(name, names, self._words): self._mark_value(item, names)
                for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._mark_value(item, names) for item in value]
        return value

    def _mark(self, text: str, names: Names, words: Set[str]) -> str:
        return text if text in self._own_words and text not in words else names.mark(text, words)


def _constants(node: nodes.Node) -> Iterator[str]:
    """Yield the texts in a template's expressions."""
    return (const.value for const in node.find_all(nodes.Const) if isinstance(const.value, str))


def _search_operands(template: nodes.Template) -> Iterator[str]:
    """Yield the texts for which a template searches in other texts."""
    operands = list[nodes.Node]()
    for compare in template.find_all(nodes.Compare):
        operands += (compare.expr, *(side.expr for side in compare.ops))
    for called in template.find_all(nodes.Call):
        if isinstance(called.node, nodes.Getattr) and called.node.attr in _LOOKING:
            operands += called.args
    for filter_ in template.find_all(nodes.Filter):
        operands += filter_.args
    for operand in operands:
        if isinstance(operand, nodes.Const) and isinstance(operand.value, str):
            yield operand.value


def _composed_words(name: str, texts: Set[str]) -> Iterator[str]:
    """Yield the words from which a template composes this name, between two of its own texts."""
    begins = [i for i in range(1, len(name)) if any(text.endswith(name[:i]) for text in texts)]
    ends = [i for i in range(1, len(name)) if any(text.startswith(name[i:]) for text in texts)]
    for begin in begins:
        for end in ends:
            if begin < end and _is_word(name[begin:end]):
                yield name[begin:end]


def _is_word(text: str) -> bool:
    return text.replace("_", "").isalnum()
