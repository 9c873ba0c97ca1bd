"""A call of /v1/responses as a chat: the messages, their record, and the options of its answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from schemas.errors import InvalidRequest, PromptTooLong
from schemas.records import StoredResponse
from streams.calls.config import GatewaySettings
from streams.calls.request.body import ChatBody
from streams.calls.request.intake import CallIntake, take_in_body
from streams.calls.request.responses_body import ResponsesBody
from streams.calls.request.served import ServedModels
from streams.calls.stream.event_id import StreamKey
from streams.openai.responses.chat import chat_body
from streams.openai.responses.form import Json
from streams.openai.responses.items import Item, check_results, messages_of
from streams.openai.responses.tools import stored_tools


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierTurns:
    """The messages of a conversation before a call; none in a new conversation."""

    session_id: str = ""
    messages: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseCall:
    """A call's body, its items, and the messages of earlier turns."""

    body: ResponsesBody
    items: Sequence[Item]
    earlier: EarlierTurns = field(default_factory=EarlierTurns)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Build the messages of the whole chat."""
        instructions = self.body.instructions
        system = [{"role": "system", "content": instructions}] if instructions else []
        return [*system, *self.earlier.messages, *messages_of(self.items)]

    def chat(self, *, ignores_unserved: bool = False) -> ChatBody:
        """Build the chat that answers the call; raises InvalidRequest.

        With `ignores_unserved`, tools that nobody here can run are left out if the call has others.
        """
        if not (messages := self.messages):
            raise InvalidRequest("input: expected a message, found none", "input")
        check_results(self.items, self.earlier.messages)
        return chat_body(self.body, messages, ignores_unserved=ignores_unserved)

    async def take_in(
        self, models: ServedModels, settings: GatewaySettings, tenant: str = ""
    ) -> CallIntake:
        """Check and tokenise the chat.

        With `truncation: auto`, the fewest possible first messages are left out of a chat that is
        too long. The results of a call go with it. Raises InvalidRequest and PromptTooLong.
        """
        # refuse values that cannot be stored before anything is computed
        self._texts(models.default.card.name)
        chat = self.chat(ignores_unserved=settings.unserved_tools == "ignore")
        try:
            return await take_in_body(chat, models, settings, tenant)
        except PromptTooLong:
            low, high = 1, len(_droppable(chat)) - 1
            if self.body.truncation != "auto" or high < low:
                raise
        while low < high:
            middle = (low + high) // 2
            try:
                await take_in_body(_without_first(chat, middle), models, settings, tenant)
                high = middle
            except PromptTooLong:
                low = middle + 1
        return await take_in_body(_without_first(chat, low), models, settings, tenant)

    def _texts(self, served: str) -> dict[str, str]:
        """Encode the stored parts of the call as JSON; raises InvalidRequest for values that JSON
        lacks."""
        options = _options(self.body, served)
        fields = [f"{_json(name, name)}:{_json(value, name)}" for name, value in options.items()]
        items = [_json(item, f"input.{i}") for i, item in enumerate(self.items)]
        return {
            "options": f"{{{','.join(fields)}}}",
            "input": f"[{','.join(items)}]",
            "history": _json(self.earlier.messages, "input"),
        }

    def record(self, intake: CallIntake, key: StreamKey) -> StoredResponse:
        """Build the record that is stored on the log."""
        search = intake.search
        return StoredResponse(
            request_id=key.parent_id,
            session_id=key.session_id,
            tenant=key.tenant,
            created_ms=key.created_s * 1000,
            deadline_ms=key.deadline_ms,
            token_partition=key.partition,
            token_offset=key.offset,
            query="" if search is None else search.query,
            include=self.body.include or (),
            **self._texts(key.model),
        )


def _json(value: Any, field: str) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:
        raise InvalidRequest(
            f"{field}: cannot be kept, nor told of: {error}; store large numbers as text", field
        ) from error


def _droppable(chat: ChatBody) -> list[int]:
    """Return the indices of messages that may be left out: all except instructions."""
    return [
        i for i, message in enumerate(chat.messages) if message.role not in ("system", "developer")
    ]


def _without_first(chat: ChatBody, count: int) -> ChatBody:
    """Leave out the first messages, and results of calls that are left out with them."""
    droppable = _droppable(chat)
    while count < len(droppable) - 1 and chat.messages[droppable[count]].role == "tool":
        count += 1
    dropped = set(droppable[:count])
    messages = [message for i, message in enumerate(chat.messages) if i not in dropped]
    return chat.model_copy(update={"messages": messages})


def _options(body: ResponsesBody, served: str) -> Json:
    """Return the options that the response repeats, with defaults for those that the call lacks."""
    text: dict[str, Any] = {"format": {"type": "text"}}
    if body.text is not None:
        text |= body.text.model_dump(by_alias=True, exclude_none=True)
    return {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model or served,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "previous_response_id": body.previous_response_id,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": text,
        "tool_choice": body.tool_choice or "auto",
        "tools": stored_tools(body.tools or ()),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
        **({"conversation": {"id": name}} if (name := body.conversation_id) is not None else {}),
    }
