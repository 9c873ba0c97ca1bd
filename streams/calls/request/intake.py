"""Converts a body to prompts and sampling parameters, or raises an error that says what to change.

Nothing here uses the log: the result is ready to become requests.
"""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from schemas.errors import InvalidRequest, PromptTooLong
from schemas.model.parser_rules import NONE
from schemas.records import Endpoint, Parsing, Sampling, Structured
from streams.calls.config import GatewaySettings
from streams.calls.errors import shorten
from streams.calls.ids import check_session_id
from streams.calls.request.body import (
    VALUES_MAX,
    ChatBody,
    CompletionBody,
    GenerationBody,
    PlacementOptions,
    one_of,
    parse,
    priority_of,
    strings,
    whole_numbers,
)
from streams.calls.request.chat import Chat, chat_of
from streams.calls.request.form import form_of
from streams.calls.request.refused import WHY_NO_PROMPT_LOGPROBS, refuse_extras
from streams.calls.request.search import PromptSearch, search_body_of, search_of
from streams.calls.request.served import ModelCard, ServedModel, ServedModels
from streams.calls.request.tools import budget_of, parsing_of, tools_of
from streams.config import ORCHESTRATIONS, POLICIES


@dataclass(frozen=True, slots=True, kw_only=True)
class CallIntake:
    """A body that passed every check. Choices of one prompt differ only in their seeds."""

    endpoint: Endpoint
    card: ModelCard  # of the model or adapter that the call names
    body: GenerationBody
    prompts: Sequence[Sequence[int]]
    samplings: Sequence[Sampling]  # one per prompt
    n: int
    search: PromptSearch | None  # of a chat: the search before the answer
    chat: Chat  # for the template; empty for a completion
    parsing: Parsing | None  # None if the answer is text
    stream: bool
    include_usage: bool
    counts_always: bool  # whether every event of a stream has the usage
    token_ids: bool
    session_id: str  # in the body, or empty
    priority: str | None
    policy: str | None
    orchestration: str | None
    user: str
    echoes: Sequence[str] = ()  # the text that precedes each choice; empty without `echo`

    @property
    def names_cache(self) -> bool:
        """Return whether the body says something about the response cache."""
        return isinstance(self.body, ChatBody) and self.body.cache is not None

    @property
    def reported_prompts(self) -> list[Sequence[int]]:
        """Return the prompt of each choice if the answer reports it; empty if passages are inserted
        into it."""
        if self.search is not None or not (self.token_ids or self.counts_always):
            return []
        return [prompt for prompt in self.prompts for _ in range(self.n)]


async def take_in(
    raw: bytes,
    endpoint: Endpoint,
    models: ServedModels,
    settings: GatewaySettings,
    tenant: str = "",
) -> CallIntake:
    """Parse and check a call's body, and tokenise its prompt."""
    body: ChatBody | CompletionBody
    if endpoint is Endpoint.CHAT:
        body = parse(ChatBody, raw)
    else:  # its prompt may be token ids
        body = parse(CompletionBody, raw, VALUES_MAX + models.len_max)
    return await take_in_body(body, models, settings, tenant)


async def take_in_body(
    body: ChatBody | CompletionBody,
    models: ServedModels,
    settings: GatewaySettings,
    tenant: str = "",
) -> CallIntake:
    """Check what the types of a body do not, and tokenise its prompt by the model that it names.
    Slow checks run in other processes."""
    served, collection = models.resident.get(body.model), ""
    if served is None:
        served, collection = await models.of_call(body.model)
    card = served.card
    if body.model_extra:
        refuse_extras(body.model_extra)
    include_usage = _include_usage(body, settings)
    n, placement = body.n or 1, body.trivium or PlacementOptions()
    raw_prompts = [body.messages] if isinstance(body, ChatBody) else _raw_prompts(body.prompt)
    if n * len(raw_prompts) > (choices_max := min(settings.choices_max, settings.in_flight_max)):
        raise InvalidRequest(
            f"n: expected at most {choices_max} answers of one call, found "
            f"{shorten(n * len(raw_prompts))}",
            "n",
        )
    form = await form_of(body, tenant) if body.names_form else None
    tokens_max = _truncation_limit(body, served, settings)
    chat = Chat()
    parsing: Parsing | None = None
    search: PromptSearch | None = None
    prompts: Sequence[Sequence[int]]
    echoes: Sequence[str] = ()
    if isinstance(body, ChatBody):
        tools = tools_of(body) if body.names_tools else ()
        chat = chat_of(body, body.messages, served.tokenizer.template, tools)
        if body.names_tools or card.parsers.reasoning != NONE:
            parsing = await parsing_of(body, tools, chat, card.parsers, tenant)
        search = await _search(body, collection, chat, served, settings, tenant)
        if search is None:
            prompts = [_cut(await chat_prompt(chat, served, settings, tenant), body, tokens_max)]
        elif tokens_max is not None:
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
        whole_prompts = [
            await _completion_prompt(raw_prompt, body, served, settings, tenant)
            for raw_prompt in raw_prompts
        ]
        prompts = [_cut(ids, body, tokens_max) for ids in whole_prompts]
        if body.echo:
            echoes = _echoes(body, raw_prompts, whole_prompts, prompts, served)
    return CallIntake(
        endpoint=Endpoint.CHAT if isinstance(body, ChatBody) else Endpoint.COMPLETION,
        card=card,
        body=body,
        prompts=prompts,
        samplings=[_sampling(body, form, prompt, served, settings, search) for prompt in prompts],
        search=search,
        n=n,
        chat=chat,
        parsing=parsing,
        stream=bool(body.stream),
        include_usage=include_usage,
        counts_always=include_usage and _counts_always(body),
        token_ids=bool(body.return_token_ids),
        session_id=check_session_id("session_id", body.session_id) if body.session_id else "",
        priority=priority_of(settings, body.priority, "priority"),
        policy=one_of(POLICIES, placement.policy, "trivium.policy"),
        orchestration=one_of(ORCHESTRATIONS, placement.orchestration, "trivium.orchestration"),
        user=body.user or "",
        echoes=[text for text in echoes for _ in range(n)],
    )


def _include_usage(body: GenerationBody, settings: GatewaySettings) -> bool:
    """Return whether a stream ends with its usage; False for an answer that is not streamed."""
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequest("stream_options: needs stream=true", "stream_options")
    is_requested = options is not None and bool(options.include_usage)
    return is_requested or (bool(body.stream) and settings.include_usage == "always")


def _counts_always(body: GenerationBody) -> bool:
    return body.stream_options is not None and bool(body.stream_options.continuous_usage_stats)


async def _search(
    body: ChatBody,
    collection: str,
    chat: Chat,
    served: ServedModel,
    settings: GatewaySettings,
    tenant: str,
) -> PromptSearch | None:
    """Return the search that precedes a chat's answer, or None."""
    if body.retrieval is None and not collection:
        return None
    search_body = search_body_of(body, collection)
    if not served.card.reads_passages:
        param = "model" if body.retrieval is None else "retrieval"
        raise InvalidRequest(
            f"{param}: passages have the tokens of the deployment's first model, and "
            f"{served.card.name!r} has others; name a model with the same tokenizer, or search "
            "nothing",
            param,
        )
    return await search_of(
        search_body,
        chat,
        served.tokenizer,
        settings,
        lambda chars: check_length(chars, "messages", served, settings),
        tenant,
    )


async def chat_prompt(
    chat: Chat, served: ServedModel, settings: GatewaySettings, tenant: str = ""
) -> "array[int]":
    """Render a chat and tokenise it."""
    return await served.tokenizer.encode_chat(
        chat,
        check_chars=lambda chars: check_length(chars, "messages", served, settings),
        tenant=tenant,
    )


def _truncation_limit(
    body: GenerationBody, served: ServedModel, settings: GatewaySettings
) -> int | None:
    """Return the limit to which longer prompts are cut, in tokens; None if they are not cut."""
    truncate_to, tokens_max = body.truncate_prompt_tokens, _prompt_tokens_max(served, settings)
    if truncate_to is not None and truncate_to > tokens_max:
        raise InvalidRequest(
            f"truncate_prompt_tokens: expected at most {tokens_max}, found {truncate_to}",
            "truncate_prompt_tokens",
        )
    return tokens_max if truncate_to == -1 else truncate_to


def _cut(ids: Sequence[int], body: GenerationBody, tokens_max: int | None) -> Sequence[int]:
    """Cut a prompt to its end, as vLLM does by default, or to its beginning for `truncation_side`
    right."""
    if tokens_max is None or len(ids) <= tokens_max:
        return ids
    return ids[:tokens_max] if body.truncation_side == "right" else ids[len(ids) - tokens_max :]


def check_length(chars: int, param: str, served: ServedModel, settings: GatewaySettings) -> None:
    """Raise PromptTooLong if a text cannot fit, before it is tokenised."""
    tokens_max = _prompt_tokens_max(served, settings)
    if chars > tokens_max * served.tokenizer.token_chars_max:
        size_text = f"{chars} characters, more than {tokens_max} tokens hold; shorten it"
        raise _too_long(size_text, param, served, tokens_max)


def _too_long(size_text: str, param: str, served: ServedModel, tokens_max: int) -> PromptTooLong:
    """Build the error by which clients know to shorten a conversation or use another model:
    OpenAI's and vLLM's first sentence, and the error code. `tokens_max` is the limit of a prompt.
    """
    limit = served.card.max_model_len
    bound = f", and at most {tokens_max} of a prompt are served" if tokens_max < limit - 1 else ""
    return PromptTooLong(
        f"This model's maximum context length is {limit} tokens{bound}. However, your prompt has "
        f"{size_text} ({PromptTooLong.code})",
        param,
    )


def _prompt_tokens_max(served: ServedModel, settings: GatewaySettings) -> int:
    """Return the limit of a prompt in tokens; at least one token is left for the answer."""
    limit = served.card.max_model_len
    return min(limit - 1, settings.prompt_tokens_max or limit)


def _raw_prompts(prompt: Any) -> list[Any]:
    """Return the prompts of a completion, each a text or token ids."""
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    return prompt if several else [prompt]


async def _completion_prompt(
    prompt: Any, body: CompletionBody, served: ServedModel, settings: GatewaySettings, tenant: str
) -> Sequence[int]:
    if not isinstance(prompt, str):
        return _check_ids(prompt, served.tokenizer.vocab)
    check_length(len(prompt), "prompt", served, settings)
    special = body.add_special_tokens is not False
    return await served.tokenizer.encode(prompt, add_special_tokens=special, tenant=tenant)


def _echoes(
    body: CompletionBody,
    raw_prompts: Sequence[Any],
    whole_prompts: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    served: ServedModel,
) -> list[str]:
    """Return the text of each prompt as the model reads it: the caller's, or that of its tokens if
    the caller sent tokens or the prompt was cut."""
    if body.logprobs is not None:
        raise InvalidRequest(
            f"echo: not supported together with logprobs; {WHY_NO_PROMPT_LOGPROBS}", "echo"
        )
    return [
        raw if isinstance(raw, str) and ids is whole else served.tokenizer.text(ids)
        for raw, whole, ids in zip(raw_prompts, whole_prompts, prompts, strict=True)
    ]


def _check_ids(value: Any, vocab: int) -> list[int]:
    ids = whole_numbers(value)
    if ids is None:
        raise InvalidRequest(
            "prompt: expected a string, token ids, or a list of one kind of these, "
            f"found {shorten(value)}",
            "prompt",
        )
    if ids and not (0 <= min(ids) and max(ids) < vocab):
        raise InvalidRequest(
            f"prompt: expected token ids from 0 to {vocab - 1}, found {shorten(min(ids))} to "
            f"{shorten(max(ids))}",
            "prompt",
        )
    return ids


def _sampling(
    body: GenerationBody,
    form: Structured | None,
    prompt: Sequence[int],
    served: ServedModel,
    settings: GatewaySettings,
    search: PromptSearch | None,
) -> Sampling:
    limit, count = served.card.max_model_len, len(prompt)
    param = "messages" if isinstance(body, ChatBody) else "prompt"
    if not count:
        raise InvalidRequest("prompt: expected at least one token, found none", "prompt")
    tokens_max = _prompt_tokens_max(served, settings)
    if count > tokens_max:
        raise _too_long(f"{count} tokens; shorten it", param, served, tokens_max)
    vocab = served.tokenizer.vocab
    free = 0 if search is None else search.reserve(limit)
    sampling = sampling_of(
        body, form, prompt_tokens=count, limit=limit, reserved_tokens=free, vocab=vocab
    )
    if not isinstance(body, ChatBody) or body.thinking_token_budget is None:
        return sampling
    return replace(sampling, thinking_token_budget=budget_of(body, served.card.parsers))


COMPLETION_TOKENS = 16  # OpenAI's default of the completions endpoint
STOPS_MAX, STOP_IDS_MAX, BIASES_MAX, BAD_WORDS_MAX = 16, 128, 1_024, 256
ALLOWED_IDS_MAX = 1_024  # vLLM's limit on CUDA devices
STOP_CHARS_MAX, BAD_WORD_CHARS_MAX = 1_024, 256  # of each
SEED_BITS = 53  # JSON readers with doubles keep such a seed exactly


def sampling_of(
    body: GenerationBody,
    form: Structured | None,
    *,
    prompt_tokens: int,
    limit: int,
    reserved_tokens: int = 0,
    vocab: int,
) -> Sampling:
    """Return the parameters for one prompt. `form` is the form of the answer from `form.py`,
    `limit` the largest number of tokens of prompt and answer together. An answer whose length the
    body does not set leaves `reserved_tokens` free."""
    max_tokens = _max_tokens(body, prompt_tokens, limit, reserved_tokens)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens: expected at most max_tokens={max_tokens}, found {min_tokens}",
            "min_tokens",
        )
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        # top_p=0 leaves only the most likely token; engines do not accept 0.
        temperature=0.0 if body.top_p == 0 else _or(body.temperature, 1.0),
        top_p=body.top_p or 1.0,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        seed=random.getrandbits(SEED_BITS) if body.seed is None else body.seed,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        stop=strings("stop", body.stop, STOPS_MAX, STOP_CHARS_MAX),
        stop_token_ids=_token_ids("stop_token_ids", body.stop_token_ids, vocab, STOP_IDS_MAX),
        include_stop=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        skip_special_tokens=body.skip_special_tokens is not False,
        logprobs=_logprobs(body),
        logit_bias=_biases(body.logit_bias, vocab),
        bad_words=strings("bad_words", body.bad_words, BAD_WORDS_MAX, BAD_WORD_CHARS_MAX),
        structured=form,
        allowed_token_ids=_token_ids(
            "allowed_token_ids", body.allowed_token_ids, vocab, ALLOWED_IDS_MAX
        ),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _max_tokens(body: GenerationBody, prompt_tokens: int, limit: int, reserved_tokens: int) -> int:
    """Return the most tokens of the answer. A number that does not fit beside the prompt means the
    rest of the context, as with vLLM: agents ask for as many tokens as the largest models have."""
    max_tokens = body.max_tokens
    free_tokens = limit - prompt_tokens
    default = free_tokens - reserved_tokens
    if isinstance(body, ChatBody):
        if body.max_completion_tokens is not None:
            max_tokens = body.max_completion_tokens
    elif max_tokens is None:
        max_tokens = min(COMPLETION_TOKENS, default)
    return default if max_tokens is None or max_tokens > free_tokens else max_tokens


def _token_ids(name: str, value: list[int] | None, vocab: int, count_max: int) -> tuple[int, ...]:
    ids = value or []
    if len(ids) > count_max:
        raise InvalidRequest(f"{name}: expected at most {count_max}, found {len(ids)}", name)
    for token_id in ids:
        if not 0 <= token_id < vocab:
            raise InvalidRequest(
                f"{name}: expected token ids from 0 to {vocab - 1}, found {shorten(token_id)}",
                name,
            )
    return tuple(ids)


def _logprobs(body: GenerationBody) -> int | None:
    if isinstance(body, ChatBody):
        if body.logprobs:
            return body.top_logprobs or 0
        if body.top_logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs=true", "top_logprobs")
        return None
    return body.logprobs if isinstance(body, CompletionBody) else None


def _biases(value: Any, vocab: int) -> dict[str, float]:
    if value is None or value == {}:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"logit_bias: expected an object of numbers, found {shorten(value)}", "logit_bias"
        )
    if len(value) > BIASES_MAX:
        raise InvalidRequest(
            f"logit_bias: expected at most {BIASES_MAX} tokens, found {len(value)}", "logit_bias"
        )
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < vocab):
            raise InvalidRequest(
                f"logit_bias: expected token ids from 0 to {vocab - 1}, found {key[:40]!r}",
                "logit_bias",
            )
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise InvalidRequest(
                f"logit_bias.{key}: expected a bias from -100 to 100, found {shorten(bias)}",
                f"logit_bias.{key}",
            )
    return {str(int(key)): float(bias) for key, bias in value.items()}
