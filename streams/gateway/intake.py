"""From the bytes of a body to prompts and sampling parameters, or an error that says what to
change.

Nothing here touches the log: what passes is ready to become requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from schemas.errors import InvalidRequest, PromptTooLong, UnknownModel
from schemas.records import Endpoint, Priority, Sampling
from streams.gateway.bodies import ChatBody, CompletionBody, GenerationBody, Message
from streams.gateway.config import GatewaySettings
from streams.gateway.errors import from_validation
from streams.gateway.fields import refuse_extras
from streams.gateway.sampling import sampling_of
from streams.gateway.tokenizer import Tokenizer

Body = TypeVar("Body", bound=BaseModel)
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
    user: str


def parse(kind: type[Body], raw: bytes) -> Body:
    """The body as its model; raises InvalidRequest."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error) from error


async def take_in(
    raw: bytes, endpoint: Endpoint, served: Served, settings: GatewaySettings
) -> Intake:
    """Check a body and tokenise its prompt."""
    body: ChatBody | CompletionBody
    if endpoint is Endpoint.CHAT:
        body = parse(ChatBody, raw)
    else:
        body = parse(CompletionBody, raw)
    if body.model != served.name:
        raise UnknownModel(f"model: expected {served.name!r}, found {body.model[:80]!r}")
    refuse_extras(body.model_extra)
    include_usage = _stream_options(body)
    messages: list[dict[str, str]] = []
    if isinstance(body, ChatBody):
        messages = plain_messages(body.messages)
        prompts = [await chat_prompt(body, messages, served)]
    else:
        prompts = await _completion_prompts(body, served)
    n = body.n or 1
    if n * len(prompts) > (most := min(settings.choices_max, settings.in_flight_max)):
        raise InvalidRequest(
            f"n: expected at most {most} answers of one call, found {n * len(prompts)}",
            "n",
        )
    return Intake(
        endpoint=endpoint,
        prompts=prompts,
        samplings=[_sampling(body, prompt, served, settings) for prompt in prompts],
        n=n,
        messages=messages,
        stream=bool(body.stream),
        include_usage=include_usage,
        token_ids=bool(body.return_token_ids),
        priority=priority_of(body.priority),
        user=body.user or "",
    )


def priority_of(value: Any, param: str = "priority") -> str | None:
    """A priority class by its name; vLLM's default number counts as none. `param` brought it."""
    if value is None or value == 0:
        return None
    if value not in list(Priority):
        raise InvalidRequest(
            f"{param}: expected one of {', '.join(Priority)}, found {str(value)[:40]!r}",
            param,
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
    body: Any, messages: Sequence[Mapping[str, str]], served: Served
) -> list[int]:
    """Render and tokenise; the template writes the special tokens itself."""
    text = served.tokenizer.render(
        messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        variables=body.chat_template_kwargs,
    )
    return await served.tokenizer.encode(text, add_special_tokens=False)


async def _completion_prompts(body: CompletionBody, served: Served) -> list[list[int]]:
    prompt = body.prompt
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    found = []
    for one in prompt if several else [prompt]:
        if isinstance(one, str):
            special = body.add_special_tokens is not False
            found.append(await served.tokenizer.encode(one, add_special_tokens=special))
        else:
            found.append(_checked_ids(one, served.tokenizer.vocab))
    return found


def _checked_ids(value: Any, vocab: int) -> list[int]:
    if not isinstance(value, list) or not all(type(token_id) is int for token_id in value):
        raise InvalidRequest(
            "prompt: expected a string, token ids, or a list of one kind of these, "
            f"found {str(value)[:80]!r}",
            "prompt",
        )
    if value and not (0 <= min(value) and max(value) < vocab):
        raise InvalidRequest(
            f"prompt: expected token ids from 0 to {vocab - 1}, found {min(value)} to {max(value)}",
            "prompt",
        )
    return value


def _sampling(
    body: GenerationBody, prompt: Sequence[int], served: Served, settings: GatewaySettings
) -> Sampling:
    limit, count = served.max_model_len, len(prompt)
    if not count:
        raise InvalidRequest("prompt: expected at least one token, found none", "prompt")
    most = min(limit - 1, settings.prompt_tokens_max or limit)
    if count > most:
        raise PromptTooLong(
            f"the prompt has {count} tokens, and at most {most} are served; shorten it"
        )
    sampling = sampling_of(body, prompt_tokens=count, limit=limit, vocab=served.tokenizer.vocab)
    if count + sampling.max_tokens > limit:
        raise PromptTooLong(
            f"the prompt has {count} tokens and max_tokens is {sampling.max_tokens}, "
            f"together more than the model's {limit}; shorten the prompt or lower max_tokens"
        )
    return sampling
