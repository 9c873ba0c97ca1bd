"""From the bytes of a body to prompts and sampling parameters, or an error that says what to
change.

Nothing here touches the log: what passes is ready to become requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from schemas.errors import InvalidRequest, PromptTooLong, UnknownModel
from schemas.records import Endpoint, Sampling, Structured
from streams.config import ORCHESTRATIONS, POLICIES
from streams.gateway.config import GatewaySettings
from streams.gateway.http.errors import from_validation, shown
from streams.gateway.request.body import ChatBody, CompletionBody, GenerationBody, Message, Wishes
from streams.gateway.request.fields import refuse_extras
from streams.gateway.request.form import form_of
from streams.gateway.request.sampling import sampling_of
from streams.gateway.request.tokenizer import Tokenizer

Body = TypeVar("Body", bound=BaseModel)
_SEPARATORS = (b",", b"[", b"{")
_ROLES_REFUSED = ("tool", "function")
# What clients send back with an assistant's message, and what has no effect on the prompt.
_MESSAGE_NEUTRAL: tuple[Any, ...] = (None, [], {}, "")
_MESSAGE_IGNORED = frozenset({"refusal", "annotations", "id", "reasoning", "reasoning_content"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The model that this deployment serves."""

    name: str
    tokenizer: Tokenizer
    max_model_len: int
    created_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """A call that passed every check. Choices of one prompt differ in their seeds only."""

    endpoint: Endpoint
    prompts: Sequence[Sequence[int]]
    samplings: Sequence[Sampling]  # one per prompt
    n: int
    messages: Sequence[Mapping[str, str]]  # of a chat, as the template got them
    stream: bool
    include_usage: bool
    token_ids: bool
    priority: str | None
    policy: str | None
    orchestration: str | None
    user: str


def parse(kind: type[Body], raw: bytes, values_max: int) -> Body:
    """The body as its model; raises InvalidRequest.

    What a value costs to read is microseconds, so their number is bounded before any is read.
    """
    if (values := _values_of(raw, values_max)) > values_max:
        raise InvalidRequest(f"the body: expected at most {values_max} values, found {values}")
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error) from error


def _values_of(raw: bytes, enough: int) -> int:
    """How many values a JSON text holds, at most; exact where there are more than enough."""
    count = sum(map(raw.count, _SEPARATORS))
    if count <= enough:
        return count
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # no quote in it is escaped now
    outside = b"".join(bare.split(b'"')[::2])
    return sum(map(outside.count, _SEPARATORS))


async def take_in(
    raw: bytes, endpoint: Endpoint, served: Served, settings: GatewaySettings
) -> Intake:
    """Check a body and tokenise its prompt."""
    body: ChatBody | CompletionBody
    if endpoint is Endpoint.CHAT:
        body = parse(ChatBody, raw, settings.values_max)
    else:  # whose prompt may be token ids
        body = parse(CompletionBody, raw, settings.values_max + served.max_model_len)
    if body.model != served.name:
        raise UnknownModel(f"model: expected {served.name!r}, found {body.model[:80]!r}")
    refuse_extras(body.model_extra)
    include_usage = _stream_options(body)
    n, wishes = body.n or 1, body.trivium or Wishes()
    given = [body.messages] if isinstance(body, ChatBody) else _given(body.prompt)
    if n * len(given) > (most := min(settings.choices_max, settings.in_flight_max)):
        raise InvalidRequest(
            f"n: expected at most {most} answers of one call, found {shown(n * len(given))}",
            "n",
        )
    form = await form_of(body, settings.aside_ms)
    messages: list[dict[str, str]] = []
    if isinstance(body, ChatBody):
        messages = plain_messages(body.messages)
        prompts = [await chat_prompt(body, messages, served, settings)]
    else:
        prompts = [await _prompt(one, body, served, settings) for one in given]
    return Intake(
        endpoint=endpoint,
        prompts=prompts,
        samplings=[_sampling(body, form, prompt, served, settings) for prompt in prompts],
        n=n,
        messages=messages,
        stream=bool(body.stream),
        include_usage=include_usage,
        token_ids=bool(body.return_token_ids),
        priority=priority_of(settings.priorities, body.priority),
        policy=one_of(POLICIES, wishes.policy, "trivium.policy"),
        orchestration=one_of(ORCHESTRATIONS, wishes.orchestration, "trivium.orchestration"),
        user=body.user or "",
    )


def priority_of(names: Sequence[str], value: Any, param: str = "priority") -> str | None:
    """One of these classes by its name; vLLM's default number is none. `param` brought it."""
    return None if value == 0 else one_of(names, value, param)


def one_of(names: Sequence[str], value: Any, param: str) -> str | None:
    """The value, if it is among the names, or None; raises InvalidRequest. `param` brought it."""
    if value is None:
        return None
    if value not in names:
        raise InvalidRequest(
            f"{param}: expected one of {', '.join(names)}, found {shown(value)}", param
        )
    return str(value)


def _stream_options(body: GenerationBody) -> bool:
    options = body.stream_options
    if options is None:
        return False
    if not body.stream:
        raise InvalidRequest("stream_options: needs stream=true", "stream_options")
    if options.continuous_usage_stats:
        raise InvalidRequest(
            "stream_options.continuous_usage_stats: not supported; use include_usage",
            "stream_options.continuous_usage_stats",
        )
    return bool(options.include_usage)


def plain_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages as templates take them; text parts are joined by line breaks."""
    plain = []
    for i, message in enumerate(messages):
        where = f"messages.{i}"
        if message.role in _ROLES_REFUSED:
            raise InvalidRequest(
                f"{where}.role: {message.role} messages are not supported; tool calling is not "
                "served, put the result into a user message",
                f"{where}.role",
            )
        for name, value in (message.model_extra or {}).items():
            if name not in _MESSAGE_IGNORED and value not in _MESSAGE_NEUTRAL:
                raise InvalidRequest(
                    f"{where}.{name}: not supported; leave it out", f"{where}.{name}"
                )
        role = "system" if message.role == "developer" else message.role
        found = {"role": role, "content": _content(message.content, where)}
        if message.name is not None:
            found["name"] = message.name
        plain.append(found)
    return plain


def _content(content: str | list[dict[str, Any]] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        if part.get("type") != "text":
            raise InvalidRequest(
                f"{where}.content.{i}.type: expected text, found {part.get('type')!r}; "
                "only text is served",
                f"{where}.content.{i}.type",
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(
                f"{where}.content.{i}.text: expected a string", f"{where}.content.{i}.text"
            )
        texts.append(part["text"])
    return "\n".join(texts)


async def chat_prompt(
    body: Any,
    messages: Sequence[Mapping[str, str]],
    served: Served,
    settings: GatewaySettings,
) -> list[int]:
    """Render and tokenise."""
    return await served.tokenizer.encode_chat(
        messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        variables=body.chat_template_kwargs,
        check_chars=lambda chars: check_length(chars, served, settings),
        limit_ms=settings.aside_ms,
    )


def check_length(chars: int, served: Served, settings: GatewaySettings) -> None:
    """Raise PromptTooLong where a text cannot fit, before anything is spent on its tokens."""
    most = prompt_max(served, settings)
    if chars > most * served.tokenizer.token_chars_max:
        raise PromptTooLong(
            f"the prompt has {chars} characters, more than {most} tokens hold; shorten it"
        )


def prompt_max(served: Served, settings: GatewaySettings) -> int:
    """Tokens of a prompt, at most: one at least is for the answer."""
    limit = served.max_model_len
    return min(limit - 1, settings.prompt_tokens_max or limit)


def _given(prompt: Any) -> list[Any]:
    """The prompts of a completion, each a text or token ids."""
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    return prompt if several else [prompt]


async def _prompt(
    one: Any, body: CompletionBody, served: Served, settings: GatewaySettings
) -> list[int]:
    if not isinstance(one, str):
        return _checked_ids(one, served.tokenizer.vocab)
    check_length(len(one), served, settings)
    special = body.add_special_tokens is not False
    return await served.tokenizer.encode(
        one, add_special_tokens=special, limit_ms=settings.aside_ms
    )


def _checked_ids(value: Any, vocab: int) -> list[int]:
    if not isinstance(value, list) or not all(type(token_id) is int for token_id in value):
        raise InvalidRequest(
            "prompt: expected a string, token ids, or a list of one kind of these, "
            f"found {shown(value)}",
            "prompt",
        )
    if value and not (0 <= min(value) and max(value) < vocab):
        raise InvalidRequest(
            f"prompt: expected token ids from 0 to {vocab - 1}, found {shown(min(value))} to "
            f"{shown(max(value))}",
            "prompt",
        )
    return value


def _sampling(
    body: GenerationBody,
    form: Structured | None,
    prompt: Sequence[int],
    served: Served,
    settings: GatewaySettings,
) -> Sampling:
    limit, count = served.max_model_len, len(prompt)
    if not count:
        raise InvalidRequest("prompt: expected at least one token, found none", "prompt")
    most = prompt_max(served, settings)
    if count > most:
        raise PromptTooLong(
            f"the prompt has {count} tokens, and at most {most} are served; shorten it"
        )
    vocab = served.tokenizer.vocab
    sampling = sampling_of(body, form, prompt_tokens=count, limit=limit, vocab=vocab)
    if count + sampling.max_tokens > limit:
        raise PromptTooLong(
            f"the prompt has {count} tokens and max_tokens is {sampling.max_tokens}, "
            f"together more than the model's {limit}; shorten the prompt or lower max_tokens"
        )
    return sampling
