"""The search before a chat's answer: from the body, or the model `MODEL@COLLECTION`, to a record.

Theory of operation. The record tells routers what to search for, and where in the prompt the
passages go. The prompt is tokenised as if nothing were found, with two marked places: before and
after the last user message. Routers insert `lead`, the passages and `trail` at the first place, and
`tail` at the second. They need no tokenizer, as passages come tokenised from the log. The prompt
before the last user message is the same with and without passages, so the KV of earlier turns can
be reused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from schemas.errors import InvalidRequest
from schemas.records import Retrieval, Sampling, Structured
from schemas.rules import filters
from schemas.rules.tokens import pack_tokens
from streams.calls.config import GatewaySettings
from streams.calls.request.body import ChatBody, SearchBody
from streams.calls.request.chat import Chat
from streams.calls.request.probing import Form, Probe, probe_of, repeat_question
from streams.calls.request.tokenizer import MarkedPrompt, Tokenizer

JOINT: Final = "\n"  # between two passages
RETRIEVAL_SHARE: Final = 0.5  # of `ttft_ms`, for the search; the rest is for the prompt
QUERY_CHARS_MAX = 8_192  # of the query; embedding models read less


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSearch:
    """A search that passed every check; `record` adds values from the rest of the call."""

    body: SearchBody
    query: str
    prompt: MarkedPrompt
    form: Form
    k: int
    passage_tokens: int  # limit of all passages together
    turns: int  # earlier turns, whose passages are inserted again
    probe: Probe | None  # searches while the answer is generated
    reserved: bytes  # ids of tokens that no passage may contain, packed

    @property
    def tokens(self) -> int:
        """Return the largest number of tokens that the search adds to a prompt."""
        lead, joint, trail, tail = map(len, self.form)
        return self.passage_tokens + lead + joint * (self.k - 1) + trail + tail

    def reserve(self, limit: int) -> int:
        """Return the tokens that an answer without a limit leaves free for passages of this turn,
        of earlier turns and of probes: at most half of what the model has left."""
        probes = self.probe.tokens if self.probe else 0
        return min(self.tokens * (1 + self.turns) + probes, (limit - len(self.prompt.ids)) // 2)

    def check_form(self, form: Structured | None) -> None:
        """Raise InvalidRequest if the answer's form excludes probes."""
        if form is not None and self.probe is not None:
            raise InvalidRequest(
                "retrieval.probes: expected none together with a form of the answer, which "
                "passages in its middle would break; leave out one of them",
                "retrieval.probes",
            )

    def record(
        self, settings: GatewaySettings, sampling: Sampling, limit: int, arrived_ms: int
    ) -> Retrieval:
        """Build the record for routers. `limit` is the largest number of tokens of prompt and
        answer together. A long answer leaves room for fewer passages, or none. Those of the prompt
        precede those of probes."""
        free_tokens = limit - len(self.prompt.ids) - sampling.max_tokens
        probing = self.probe.record(free_tokens - self.tokens) if self.probe else None
        if self.probe and probing:
            free_tokens -= probing.tokens_max + probing.probes_max * self.probe.overhead_tokens
        body = self.body
        lead, joint, trail, tail = map(pack_tokens, self.form)
        return Retrieval(
            collection=body.collection,
            query=self.query,
            k=self.k,
            mode=body.mode or settings.retrieval_mode,
            filter=filters.text_of(body.filter),
            min_score=settings.retrieval_min_score if body.min_score is None else body.min_score,
            by_ms=arrived_ms + round(settings.ttft_ms * RETRIEVAL_SHARE),
            tokens_max=max(0, self.passage_tokens - max(0, self.tokens - free_tokens)),
            at=self.prompt.at,
            lead=lead,
            joint=joint,
            trail=trail,
            tail_at=self.prompt.tail_at,
            tail=tail,
            history_tokens=self.prompt.at,
            room_tokens=max(0, free_tokens),
            probing=probing,
            reserved=self.reserved,
        )


def search_body_of(body: ChatBody, collection: str) -> SearchBody:
    """Return the search that the body or the model's name wishes; raises InvalidRequest if they
    differ."""
    search_body = body.retrieval
    if search_body is None:
        search_body = SearchBody.model_validate({"collection": collection[:128]})
    if collection and search_body.collection != collection:
        raise InvalidRequest(
            f"retrieval.collection: the model names {collection[:80]!r}, found "
            f"{search_body.collection[:80]!r}; name one of them only",
            "retrieval.collection",
        )
    return search_body


async def search_of(
    search_body: SearchBody,
    chat: Chat,
    tokenizer: Tokenizer,
    settings: GatewaySettings,
    check_chars: Callable[[int], None],
    tenant: str,
) -> PromptSearch:
    """Check the search, and tokenise its chat; raises InvalidRequest."""
    messages = chat.messages
    user_index = _last_user(messages)
    query = messages[user_index]["content"] if search_body.query is None else search_body.query
    if not query.strip():
        raise InvalidRequest("retrieval.query: expected a text, found an empty one", "retrieval")
    prompt = await tokenizer.encode_marked_chat(
        chat, user_index, check_chars=check_chars, tenant=tenant
    )
    lead, trail, tail = settings.context_texts()
    ids = tokenizer.encoder.ids
    form = (ids([lead]), ids([JOINT]), ids([trail]), ids([tail]))
    probe = None
    if search_body.probes is not None:
        follow_up = [*messages, {"role": "assistant", "content": ""}, messages[user_index]]
        longer = await tokenizer.encode_marked_chat(
            replace(chat, messages=follow_up, add_generation_prompt=True, continues_last=False),
            len(follow_up) - 1,
            check_chars=check_chars,
            tenant=tenant,
        )
        probe = probe_of(
            search_body, search_body.probes, settings, repeat_question(prompt, longer, form)
        )
    return PromptSearch(
        body=search_body,
        query=query[:QUERY_CHARS_MAX],
        prompt=prompt,
        form=form,
        k=search_body.k or settings.retrieval_k,
        passage_tokens=search_body.tokens_max or settings.retrieval_tokens_max,
        turns=sum(message["role"] == "assistant" for message in messages),
        probe=probe,
        reserved=tokenizer.reserved,
    )


def _last_user(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the index of the last user message; raises InvalidRequest if there is none."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index]["role"] == "user":
            return index
    raise InvalidRequest("retrieval: needs a user message that asks for something", "retrieval")
