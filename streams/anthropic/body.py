"""The bodies of POST /v1/messages and /v1/messages/count_tokens: Anthropic's fields.

A field is refused, never ignored, if it would have to change the answer and cannot.
`streams/anthropic/turns.py` reads the content of turns, `streams/anthropic/chat.py` the rest.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from schemas.errors import InvalidRequest
from streams.calls.request.body import MESSAGES_MAX, StrictBody, Whole
from streams.calls.request.responses_body import EXTENSIONS as RESPONSE_EXTENSIONS

USER_CHARS_MAX = 512
Blocks = str | list[dict[str, Any]]
# Fields of a chat's body, with the same meaning; clients of `anthropic` send them as `extra_body`.
EXTENSIONS = RESPONSE_EXTENSIONS - {"stop", "top_k"}
# Hints that change no answer here: prefixes are cached without marks, and nothing is edited.
_HARMLESS = frozenset(
    {
        *("cache_control", "context_management", "diagnostics", "inference_geo", "betas"),
        *("billing_policy", "speed"),
    }
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "fallbacks": ([],),
    "compaction": (),
    "thread": (),
}
_ADVICE = {"mcp_servers": "call the servers in the client, and send their tools as `tools`"}


class ThinkingConfig(StrictBody):
    """Whether the model thinks before it answers, and for how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Whole | None = Field(None, ge=1, le=2**31 - 1)
    display: Literal["summarized", "omitted"] | None = None

    @property
    def is_shown(self) -> bool:
        """Return whether the answer has blocks of thinking."""
        return self.type != "disabled" and self.display != "omitted"


class OutputFormat(StrictBody):
    """A JSON schema that the answer has to have."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictBody):
    """The effort and the form of the answer."""

    effort: Annotated[str, Field(max_length=64)] | None = None
    format: OutputFormat | None = None


class CallMetadata(StrictBody):
    """What the caller says about a call."""

    user_id: Annotated[str, Field(max_length=USER_CHARS_MAX)] | None = None


class ToolChoice(StrictBody):
    """Which tools the answer may call, or must."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessageTurn(StrictBody):
    """One turn of a conversation; content is text or a list of blocks."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class CountTokensBody(StrictBody):
    """The body of POST /v1/messages/count_tokens: all that a prompt is made of."""

    model: str
    messages: list[MessageTurn] = Field(min_length=1, max_length=MESSAGES_MAX)
    system: Blocks | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountTokensBody):
    """The body of POST /v1/messages."""

    max_tokens: Whole = Field(ge=1, le=2**31 - 1)
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: Whole | None = Field(None, ge=0, le=2**31 - 1)
    metadata: CallMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    @property
    def thinking_tokens_max(self) -> int | None:
        """Return the most tokens of thinking, or None for no bound of its own."""
        return None if self.thinking is None else self.thinking.budget_tokens


def refuse_fields(body: CountTokensBody) -> None:
    """Raise InvalidRequest for the first field that would have to change the answer."""
    for name, value in (body.model_extra or {}).items():
        if name in _HARMLESS or name in EXTENSIONS or value is None:
            continue
        if name in MessagesBody.model_fields:
            continue  # of an answer, which changes no count of a prompt
        if name not in _NEUTRAL:
            raise InvalidRequest(f"{name}: unknown field; check its spelling or leave it out", name)
        if value not in _NEUTRAL[name]:
            raise InvalidRequest(
                f"{name}: not supported; {_ADVICE.get(name, 'leave it out')}", name
            )
