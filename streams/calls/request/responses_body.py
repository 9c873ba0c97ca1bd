"""The body of POST /v1/responses: OpenAI's fields that are served, and those that are refused.

A field is refused, never ignored, if it would have to change the answer and cannot.
`streams/openai/responses/chat.py` converts the other fields to a chat.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, WithJsonSchema

from schemas.errors import InvalidRequest
from schemas.rules.sizes import PASSAGES_MAX
from streams.calls.errors import from_detail, shorten
from streams.calls.request.body import MESSAGES_MAX, Body, StrictBody, Whole
from streams.calls.request.refused import HARMLESS

INCLUDE = RESULTS, LOGPROBS = "file_search_call.results", "message.output_text.logprobs"
# Fields of items that no answer here has, so nothing is missing.
_INCLUDES_NOTHING = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
_METADATA_MAX, _KEY_CHARS_MAX, _VALUE_CHARS_MAX = 16, 64, 512
# Fields of a chat's body, with the same meaning; clients of `openai` send them as `extra_body`.
EXTENSIONS = frozenset(
    {
        *("seed", "stop", "top_k", "min_p", "min_tokens", "ignore_eos", "logit_bias"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "chat_template_kwargs"),
        "thinking_token_budget",
        *("retrieval", "priority", "cache_salt", "trivium"),
    }
)
# A client's own notes; an answer calls the tools of this server at most once.
_HARMLESS = HARMLESS | {"max_tool_calls", "client_metadata"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "prompt": (),
    "moderation": (),
    "context_management": ([],),
    "access_programs": ({},),
    "image": (),
}
_ADVICE = {
    "prompt": "no prompt templates are kept here; send the messages",
}
_TEXT = {"type": "string"}
_REFERENCE = {"type": "object", "properties": {"id": _TEXT}, "required": ["id"]}
_Conversation = Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, _REFERENCE, {"type": "null"}]})]


class TextFormat(StrictBody):
    """Constrains the form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(StrictBody):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # for templates that use it


class RankingOptions(StrictBody):
    """Sets how a file search ranks its results."""

    ranker: Literal["auto", "default-2024-11-15"] | None = None
    score_threshold: float | None = Field(None, ge=0, le=1)


class FileSearchTool(StrictBody):
    """A search in a collection before the answer begins; no other tool runs on the server."""

    type: Literal["file_search"]
    vector_store_ids: list[str] = Field(min_length=1)
    filters: dict[str, Any] | None = None
    max_num_results: Whole | None = Field(None, ge=1, le=min(50, PASSAGES_MAX))
    ranking_options: RankingOptions | None = None


class ResponseStreamOptions(StrictBody):
    """Fields that a stream carries besides events."""

    include_obfuscation: bool | None = None  # padding against traffic analysis; never added here


class Reasoning(StrictBody):
    """The effort of reasoning, for templates that use it. Summaries are never made."""

    effort: Annotated[str, Field(max_length=64)] | None = None


class ResponsesBody(StrictBody):
    """The body of POST /v1/responses."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(max_length=MESSAGES_MAX)]
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: _Conversation = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    max_output_tokens: Whole | None = Field(None, ge=1, le=2**31 - 1)
    top_logprobs: Whole | None = Field(None, ge=0, le=20)
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    background: bool | None = None
    user: Annotated[str, Field(max_length=512)] | None = None

    @property
    def conversation_id(self) -> str | None:
        """Return the id of the conversation, None without one; raises InvalidRequest."""
        name = self.conversation
        if isinstance(name, dict) and set(name) == {"id"}:
            name = name["id"]
        if name is None and self.conversation is None:
            return None
        if not name or not isinstance(name, str):
            raise InvalidRequest(
                "conversation: expected the id of a conversation, or an object that has only its "
                f"id, found {shorten(self.conversation)}",
                "conversation",
            )
        if self.previous_response_id is not None:
            raise InvalidRequest(
                "conversation: cannot be used together with previous_response_id; leave one out",
                "conversation",
            )
        return name


def refuse_fields(body: ResponsesBody) -> None:
    """Raise InvalidRequest for the first field that would have to change the answer."""
    for name, value in (body.model_extra or {}).items():
        if name in _HARMLESS or name in EXTENSIONS or value is None:
            continue
        if name not in _NEUTRAL:
            raise InvalidRequest(f"{name}: unknown field; check its spelling or leave it out", name)
        if value not in _NEUTRAL[name]:
            raise InvalidRequest(
                f"{name}: not supported; {_ADVICE.get(name, 'leave it out')}", name
            )
    body.conversation_id  # noqa: B018  # raises if it is none
    for i, name in enumerate(body.include or ()):
        check_include(name, f"include.{i}")
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise InvalidRequest(f"top_logprobs: needs {LOGPROBS} in include", "top_logprobs")
    if body.background and body.store is False:
        raise InvalidRequest("background: needs store, which is false", "background")
    _check_metadata(body.metadata or {})
    text = body.text
    if text is None:
        return
    refuse_extras("text", text)
    if text.format is not None:
        refuse_extras("text.format", text.format)


def check_include(name: str, where: str = "include") -> None:
    """Raise InvalidRequest for a value that OpenAI does not know either."""
    if name not in (*INCLUDE, *_INCLUDES_NOTHING):
        raise InvalidRequest(
            f"{where}: expected {RESULTS}, {LOGPROBS} or what no answer here has, as "
            f"{', '.join(_INCLUDES_NOTHING)}, found {shorten(name)}",
            "include",
        )


def refuse_extras(where: str, part: StrictBody) -> None:
    for name, value in (part.model_extra or {}).items():
        if value is not None:
            raise InvalidRequest(f"{where}.{name}: not supported; leave it out", f"{where}.{name}")


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > _METADATA_MAX:
        raise InvalidRequest(
            f"metadata: expected at most {_METADATA_MAX} entries, found {len(metadata)}", "metadata"
        )
    for key, value in metadata.items():
        if len(key) > _KEY_CHARS_MAX or len(value) > _VALUE_CHARS_MAX:
            raise InvalidRequest(
                f"metadata: expected keys of at most {_KEY_CHARS_MAX} characters and values of at "
                f"most {_VALUE_CHARS_MAX}, found {shorten(key)}",
                "metadata",
            )


def parse_fields(kind: type[Body], fields: Mapping[str, Any], where: str = "") -> Body:
    """Parse fields into a model; raises InvalidRequest that names the field under `where`."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        outer = where.split(".") if where else []
        raise from_detail({**first, "loc": (*outer, *first["loc"])}) from error
