"""Decides whether a chat uses the response cache, and computes its key.

The key covers everything that determines an answer except the last question. Two chats with the
same key differ only in that question. So only questions are compared by similarity.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from schemas.errors import InvalidRequest
from schemas.records import Endpoint
from schemas.rules.tokens import pack_tokens
from streams.calls.config import EVERYTHING, GatewaySettings
from streams.calls.request.body import CacheBody, ChatBody
from streams.calls.request.intake import CallIntake

QUESTION_CHARS_MAX = 1_000  # embedding models read the beginning only
_VERSION = "1"
_DEFAULTS = CacheBody.model_validate({})
# Fields of a chat that do not change its answer's text, or not of one that may be cached.
CHANGES_NO_TEXT = frozenset(
    "model stream stream_options seed n logprobs top_logprobs return_token_ids "
    "return_tokens_as_token_ids user session_id "
    "priority trivium cache".split()
)
# Fields of which the key has the checked values; it has all others as in the body.
CHECKED = frozenset(
    "messages retrieval temperature top_p top_k min_p stop stop_token_ids ignore_eos min_tokens "
    "include_stop_str_in_output max_tokens max_completion_tokens presence_penalty "
    "frequency_penalty repetition_penalty logit_bias allowed_token_ids bad_words "
    "skip_special_tokens response_format structured_outputs guided_json guided_regex "
    "guided_choice guided_grammar "
    "tools tool_choice functions function_call reasoning_effort add_generation_prompt "
    "continue_final_message chat_template_kwargs thinking_token_budget".split()
)
_NUMBER_BITS = 53  # a metadata column stores these exactly


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheQuery:
    """A chat whose answer may be cached."""

    key: str
    question: str
    threshold: float
    ttl_s: int

    @property
    def number(self) -> int:
        """Return the key as a number for filters; entries have the whole key, too."""
        return int(self.key, 16) % (1 << _NUMBER_BITS)


def cache_query(intake: CallIntake, settings: GatewaySettings, tenant: str) -> CacheQuery | None:
    """Return the query of a call; None if it does not use the cache.

    Raises InvalidRequest if a call asks for the cache and cannot use it.
    """
    chat = intake.body
    if intake.endpoint is not Endpoint.CHAT or not isinstance(chat, ChatBody):
        return None
    options = chat.cache or _DEFAULTS
    is_requested = chat.cache is not None and options.enabled is not False
    if not is_requested and (options.enabled is False or not _by_settings(intake, settings)):
        return None
    if (hindrance := _hindrance(intake)) is not None:
        if is_requested:
            raise InvalidRequest(f"cache: {hindrance}", "cache")
        return None
    last = intake.chat.messages[-1]
    question = last["content"].strip()
    if last["role"] != "user" or not 0 < len(question) <= QUESTION_CHARS_MAX:
        return None
    if intake.search is not None and intake.search.turns:
        return None  # its prompt has passages of earlier turns, which no notice lists
    return CacheQuery(
        key=_key(intake, chat, settings, tenant),
        question=question,
        threshold=settings.cache_threshold if options.threshold is None else options.threshold,
        ttl_s=options.ttl_s or settings.cache_ttl_s,
    )


def _by_settings(intake: CallIntake, settings: GatewaySettings) -> bool:
    if EVERYTHING in settings.cache_for:
        return True
    return intake.search is not None and intake.search.body.collection in settings.cache_for


def _hindrance(intake: CallIntake) -> str | None:
    """Return why an answer cannot serve other callers, or None."""
    sampling = intake.samplings[0]
    if sampling.temperature:
        return "needs temperature 0; an answer that is drawn at random is one of many"
    if intake.n > 1:
        return "needs n=1; several answers are not kept"
    if sampling.logprobs is not None or intake.token_ids:
        return "keeps neither log-probabilities nor token ids; leave them out"
    if intake.parsing is not None:
        return "keeps answers in text; this one may have tool calls or reasoning"
    return None


def _key(intake: CallIntake, chat: ChatBody, settings: GatewaySettings, tenant: str) -> str:
    *earlier_messages, last = intake.chat.messages
    length = chat.max_completion_tokens or chat.max_tokens or 0  # the default differs by prompt
    sampling = replace(intake.samplings[0], seed=0, max_tokens=length)
    other_fields = chat.model_dump(exclude=set(CHANGES_NO_TEXT | CHECKED))
    is_cut = chat.truncate_prompt_tokens is not None  # where, depends on the whole question
    parts: Sequence[Any] = (
        _VERSION,
        tenant,
        intake.card.name,
        intake.card.max_model_len,
        [sorted(message.items()) for message in earlier_messages],
        sorted((name, value) for name, value in last.items() if name != "content"),
        replace(intake.chat, messages=()),
        sampling,
        _search_parts(intake, settings),
        sorted((name, value) for name, value in other_fields.items() if value is not None),
        last["content"] if is_cut else "",
    )
    return hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _search_parts(intake: CallIntake, settings: GatewaySettings) -> Sequence[Any]:
    search = intake.search
    if search is None:
        return ()
    probe = search.probe
    return (
        search.body.model_dump(mode="json"),
        (search.k, search.passage_tokens, [pack_tokens(part) for part in search.form]),
        (settings.retrieval_mode, settings.retrieval_min_score),
        (probe.tokens_max, probe.min_score, probe.form) if probe else (),
    )
