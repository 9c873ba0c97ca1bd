"""From a body and its headers to prompts, sampling parameters and options, or an error that says
what to change.

Nothing here touches the log: what passes is ready to become requests.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from schemas.errors import InvalidRequest, PromptTooLong
from schemas.records import Endpoint, Priority, Sampling, Structured
from streams.config import ORCHESTRATIONS, POLICIES
from streams.gateway.config import GatewaySettings
from streams.gateway.http.errors import shown
from streams.gateway.http.exchange import Exchange, RawHeaders
from streams.gateway.request.body import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    Wishes,
    parse,
    whole_numbers,
)
from streams.gateway.request.conversation import checked_session
from streams.gateway.request.fields import refuse_extras
from streams.gateway.request.form import form_of
from streams.gateway.request.messages import chat_of
from streams.gateway.request.sampling import sampling_of
from streams.gateway.request.search import Search, collection_of, search_of, wished_search
from streams.gateway.request.tokenizer import Chat, Tokenizer

PRIORITY_HEADER, DEADLINE_HEADER = "x-priority", "x-deadline-ms"
WEIGHTS_HEADER, DISCONNECT_HEADER = "x-trivium-weights", "x-trivium-on-disconnect"
EVENT_IDS_HEADER = "x-trivium-event-ids"
POLICY_HEADER, ORCHESTRATION_HEADER = "x-trivium-policy", "x-trivium-orchestration"
_WEIGHTS = ("ttft", "tpot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The model that this deployment serves."""

    name: str
    tokenizer: Tokenizer
    max_model_len: int
    created_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """A body that passed every check. Choices of one prompt differ in their seeds only."""

    endpoint: Endpoint
    body: GenerationBody
    prompts: Sequence[Sequence[int]]
    samplings: Sequence[Sampling]  # one per prompt
    n: int
    search: Search | None  # of a chat: what is to be found before the answer
    chat: Chat  # as the template got it; of a completion an empty one
    stream: bool
    include_usage: bool
    counts_always: bool  # in every event of a stream
    token_ids: bool
    session_id: str  # that the body names, or empty
    priority: str | None
    policy: str | None
    orchestration: str | None
    user: str

    @property
    def told_prompts(self) -> list[Sequence[int]]:
        """Each choice's prompt, where answers tell of them and no passages will stand in them."""
        if self.search is not None or not (self.token_ids or self.counts_always):
            return []
        return [prompt for prompt in self.prompts for _ in range(self.n)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """How a call is to be treated, by its body or else by its headers, or as is usual here."""

    priority: Priority
    deadline_ms: int
    w_ttft: float  # -1, both, where the call names no weights
    w_tpot: float
    policy: str  # empty where none is wished, as the next
    orchestration: str
    keeps_running: bool  # when the client hangs up
    event_ids: bool = False  # its client may resume the stream


async def take_in(
    raw: bytes, endpoint: Endpoint, served: Served, settings: GatewaySettings, tenant: str = ""
) -> Intake:
    """Check a call's bytes and tokenise its prompt."""
    body: ChatBody | CompletionBody
    if endpoint is Endpoint.CHAT:
        body = parse(ChatBody, raw, settings.values_max)
    else:  # whose prompt may be token ids
        body = parse(CompletionBody, raw, settings.values_max + served.max_model_len)
    return await take_in_body(body, served, settings, tenant)


async def take_in_body(
    body: ChatBody | CompletionBody, served: Served, settings: GatewaySettings, tenant: str = ""
) -> Intake:
    """Check what its types do not, and tokenise its prompt; what takes long has its turn."""
    collection = collection_of(body.model or served.name, served.name)
    if body.model_extra:
        refuse_extras(body.model_extra)
    include_usage = _include_usage(body)
    n, wishes = body.n or 1, body.trivium or Wishes()
    given = [body.messages] if isinstance(body, ChatBody) else _prompts_given(body.prompt)
    if n * len(given) > (most := min(settings.choices_max, settings.in_flight_max)):
        raise InvalidRequest(
            f"n: expected at most {most} answers of one call, found {shown(n * len(given))}",
            "n",
        )
    form = await form_of(body, settings.aside_ms, tenant) if body.names_form else None
    keeps = _kept_tokens(body, served, settings)
    chat = Chat()
    search: Search | None = None
    prompts: Sequence[Sequence[int]]
    if isinstance(body, ChatBody):
        chat = chat_of(body, body.messages, served.tokenizer)
        search = await _search(body, collection, chat, served, settings, tenant)
        if search is None:
            prompts = [_cut(await chat_prompt(chat, served, settings, tenant), body, keeps)]
        elif keeps is not None:
            raise InvalidRequest(
                "truncate_prompt_tokens: expected none together with retrieval, whose passages "
                "have their places in the prompt; leave out one of them",
                "truncate_prompt_tokens",
            )
        else:
            search.check_form(form)
            prompts = [search.prompt.ids]
    elif collection:
        raise InvalidRequest("model: only chats are looked up in a collection", "model")
    else:
        prompts = [
            _cut(await _completion_prompt(each, body, served, settings, tenant), body, keeps)
            for each in given
        ]
    return Intake(
        endpoint=Endpoint.CHAT if isinstance(body, ChatBody) else Endpoint.COMPLETION,
        body=body,
        prompts=prompts,
        samplings=[_sampling(body, form, prompt, served, settings, search) for prompt in prompts],
        search=search,
        n=n,
        chat=chat,
        stream=bool(body.stream),
        include_usage=include_usage,
        counts_always=include_usage and _counts_always(body),
        token_ids=bool(body.return_token_ids),
        session_id=checked_session("session_id", body.session_id) if body.session_id else "",
        priority=_priority_of(settings, body.priority, "priority"),
        policy=_one_of(POLICIES, wishes.policy, "trivium.policy"),
        orchestration=_one_of(ORCHESTRATIONS, wishes.orchestration, "trivium.orchestration"),
        user=body.user or "",
    )


def options_of(exchange: Exchange, intake: Intake, settings: GatewaySettings) -> CallOptions:
    """What the call asks for besides its answer; raises InvalidRequest."""
    headers = exchange.headers
    priority = intake.priority or _priority_of(
        settings, _text_of(headers, PRIORITY_HEADER), PRIORITY_HEADER
    )
    relative_ms = exchange.number(DEADLINE_HEADER, 1, settings.deadline_ms_max)
    w_ttft, w_tpot = _weights(headers)
    keeps_running = _choice(headers, DISCONNECT_HEADER, "cancel", "continue")
    event_ids = _choice(headers, EVENT_IDS_HEADER, "false", "true")
    return CallOptions(
        priority=Priority(priority or settings.priority),
        deadline_ms=exchange.arrived_ms + (relative_ms or settings.deadline_ms),
        w_ttft=w_ttft,
        w_tpot=w_tpot,
        policy=intake.policy or _wish(headers, POLICY_HEADER, POLICIES),
        orchestration=intake.orchestration or _wish(headers, ORCHESTRATION_HEADER, ORCHESTRATIONS),
        keeps_running=bool(keeps_running),
        event_ids=bool(keeps_running) if event_ids is None else event_ids,
    )


def _text_of(headers: RawHeaders, name: str) -> str | None:
    value = headers.get(name.encode())
    return None if value is None else value.decode("latin-1")


def _priority_of(settings: GatewaySettings, value: Any, param: str) -> str | None:
    """One of these classes by its name; vLLM's default number is none. `param` brought it."""
    return None if value is None or value == 0 else _one_of(settings.priorities, value, param)


def _one_of(names: Sequence[str], value: Any, param: str) -> str | None:
    """The value, if it is among the names, or None; raises InvalidRequest. `param` brought it."""
    if value is None:
        return None
    if value not in names:
        raise InvalidRequest(
            f"{param}: expected one of {', '.join(names)}, found {shown(value)}", param
        )
    return str(value)


def _wish(headers: RawHeaders, header: str, names: Sequence[str]) -> str:
    text = _text_of(headers, header)
    return _one_of(names, text and text.strip().lower(), header) or ""


def _choice(headers: RawHeaders, header: str, no: str, yes: str) -> bool | None:
    """Which of two words a header holds; None without it. Raises InvalidRequest."""
    text = _text_of(headers, header)
    if text is None:
        return None
    if (word := text.strip().lower()) not in (no, yes):
        raise InvalidRequest(f"{header}: expected {no} or {yes}, found {text[:40]!r}", header)
    return word == yes


def _weights(headers: RawHeaders) -> tuple[float, float]:
    """Weights of TTFT and TPOT for placement; what the header does not name weighs 0, and -1
    stands for a call without the header. Raises InvalidRequest.
    """
    text = _text_of(headers, WEIGHTS_HEADER)
    if text is None:
        return -1.0, -1.0
    weights: dict[str, float] = {}
    try:
        for part in text.split(","):
            name, _, number = part.partition("=")
            weight = float(number)
            name = name.strip().lower()
            if name not in _WEIGHTS or name in weights or not 0 <= weight < math.inf:
                raise ValueError
            weights[name] = weight
        if not any(weights.values()):
            raise ValueError
    except ValueError:
        raise InvalidRequest(
            f"{WEIGHTS_HEADER}: expected ttft=NUMBER,tpot=NUMBER with numbers of at least 0, one "
            f"of them above 0, found {text[:60]!r}",
            WEIGHTS_HEADER,
        ) from None
    return weights.get("ttft", 0.0), weights.get("tpot", 0.0)


def _include_usage(body: GenerationBody) -> bool:
    options = body.stream_options
    if options is None:
        return False
    if not body.stream:
        raise InvalidRequest("stream_options: needs stream=true", "stream_options")
    return bool(options.include_usage)


def _counts_always(body: GenerationBody) -> bool:
    return body.stream_options is not None and bool(body.stream_options.continuous_usage_stats)


async def _search(
    body: ChatBody,
    collection: str,
    chat: Chat,
    served: Served,
    settings: GatewaySettings,
    tenant: str,
) -> Search | None:
    """What is to be found for a chat first, if anything is."""
    wished = wished_search(body, collection)
    if wished is None:
        return None
    return await search_of(
        wished,
        chat,
        served.tokenizer,
        settings,
        lambda chars: check_length(chars, "messages", served, settings),
        tenant,
    )


async def chat_prompt(
    chat: Chat, served: Served, settings: GatewaySettings, tenant: str = ""
) -> "array[int]":
    """Render and tokenise."""
    return await served.tokenizer.encode_chat(
        chat,
        check_chars=lambda chars: check_length(chars, "messages", served, settings),
        limit_ms=settings.aside_ms,
        tenant=tenant,
    )


def _kept_tokens(body: GenerationBody, served: Served, settings: GatewaySettings) -> int | None:
    """How much of a longer prompt is kept; None where it is not to be cut."""
    wished, most = body.truncate_prompt_tokens, _prompt_tokens_max(served, settings)
    if wished is not None and wished > most:
        raise InvalidRequest(
            f"truncate_prompt_tokens: expected at most {most}, found {wished}",
            "truncate_prompt_tokens",
        )
    return most if wished == -1 else wished


def _cut(ids: Sequence[int], body: GenerationBody, keeps: int | None) -> Sequence[int]:
    """Its end, as vLLM does where no side is named."""
    if keeps is None or len(ids) <= keeps:
        return ids
    return ids[:keeps] if body.truncation_side == "right" else ids[len(ids) - keeps :]


def check_length(chars: int, param: str, served: Served, settings: GatewaySettings) -> None:
    """Raise PromptTooLong where a text cannot fit, before anything is spent on its tokens."""
    most = _prompt_tokens_max(served, settings)
    if chars > most * served.tokenizer.token_chars_max:
        found = f"{chars} characters, more than {most} tokens hold; shorten it"
        raise _too_long(found, param, served, most)


def _too_long(found: str, param: str, served: Served, most: int) -> PromptTooLong:
    """In the words by which clients know it, to shorten a conversation or ask another model:
    OpenAI's and vLLM's first sentence, and the code itself. `most`: tokens of a prompt.
    """
    limit = served.max_model_len
    bound = f", and at most {most} of a prompt are served" if most < limit - 1 else ""
    return PromptTooLong(
        f"This model's maximum context length is {limit} tokens{bound}. However, your prompt has "
        f"{found} ({PromptTooLong.code})",
        param,
    )


def _prompt_tokens_max(served: Served, settings: GatewaySettings) -> int:
    """One token at least is for the answer."""
    limit = served.max_model_len
    return min(limit - 1, settings.prompt_tokens_max or limit)


def _prompts_given(prompt: Any) -> list[Any]:
    """The prompts of a completion, each a text or token ids."""
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    return prompt if several else [prompt]


async def _completion_prompt(
    prompt: Any, body: CompletionBody, served: Served, settings: GatewaySettings, tenant: str
) -> Sequence[int]:
    if not isinstance(prompt, str):
        return _checked_ids(prompt, served.tokenizer.vocab)
    check_length(len(prompt), "prompt", served, settings)
    special = body.add_special_tokens is not False
    return await served.tokenizer.encode(
        prompt, add_special_tokens=special, limit_ms=settings.aside_ms, tenant=tenant
    )


def _checked_ids(value: Any, vocab: int) -> list[int]:
    ids = whole_numbers(value)
    if ids is None:
        raise InvalidRequest(
            "prompt: expected a string, token ids, or a list of one kind of these, "
            f"found {shown(value)}",
            "prompt",
        )
    if ids and not (0 <= min(ids) and max(ids) < vocab):
        raise InvalidRequest(
            f"prompt: expected token ids from 0 to {vocab - 1}, found {shown(min(ids))} to "
            f"{shown(max(ids))}",
            "prompt",
        )
    return ids


def _sampling(
    body: GenerationBody,
    form: Structured | None,
    prompt: Sequence[int],
    served: Served,
    settings: GatewaySettings,
    search: Search | None,
) -> Sampling:
    limit, count = served.max_model_len, len(prompt)
    param = "messages" if isinstance(body, ChatBody) else "prompt"
    if not count:
        raise InvalidRequest("prompt: expected at least one token, found none", "prompt")
    most = _prompt_tokens_max(served, settings)
    if count > most:
        raise _too_long(f"{count} tokens; shorten it", param, served, most)
    vocab = served.tokenizer.vocab
    free = 0 if search is None else search.reserve(limit)
    sampling = sampling_of(body, form, prompt_tokens=count, limit=limit - free, vocab=vocab)
    if count + sampling.max_tokens > limit:
        wanted = f"max_tokens is {sampling.max_tokens}; shorten the prompt or lower max_tokens"
        raise _too_long(f"{count} tokens and {wanted}", param, served, limit)
    return sampling
