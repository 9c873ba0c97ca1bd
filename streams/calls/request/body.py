"""Request bodies of the two generating endpoints and of /tokenize, as pydantic models.

Types and ranges are checked only here: an engine never gets a value that did not pass. Values that
depend on the model (context length, vocabulary) or on several fields are checked in `intake.py`,
and `chat.py`.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    WithJsonSchema,
)

from schemas.errors import InvalidRequest
from schemas.records import Priority
from schemas.rules.numbers import SEED_MAX, SEED_MIN
from schemas.rules.sizes import COLLECTION_CHARS_MAX, PASSAGES_MAX, PROBES_MAX, TRIGGER_CHARS_MAX
from streams.calls.config import GatewaySettings
from streams.calls.errors import from_validation, shorten
from streams.config import ORCHESTRATIONS, POLICIES

Body = TypeVar("Body", bound=BaseModel)

_INT_32_MAX = 2**31 - 1
VALUES_MAX: Final = 32_768  # of a body: they cost the event loop a tenth of a second
STALL_MS_MAX = 60_000
TTL_S_MAX = 30 * 86_400
_SEPARATORS = (b",", b"[", b"{")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # that Windows tools write before JSON


# Only the first error in a list is reported; to find the others would cost time.
class _FailFirst(FailFast):
    def __hash__(self) -> int:  # members of a union have to be hashable
        return 1


CACHE_SALT_CHARS_MAX = 256  # the salt travels with each request to routers and workers
MESSAGES_MAX = 2_048  # OpenAI's limit; more messages cost the event loop more than their texts


def whole(value: Any) -> Any:
    """Convert `4.0` to 4: clients that compute with doubles write whole numbers so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def whole_numbers(value: Any) -> list[int] | None:
    """Return a list of whole numbers as integers; None for any other value."""
    if not isinstance(value, list):
        return None
    if set(map(type, value)) <= {int}:
        return value
    numbers: list[Any] = [whole(number) for number in value]
    return numbers if set(map(type, numbers)) == {int} else None


Whole = Annotated[int, BeforeValidator(whole)]
Texts = Annotated[list[str], _FailFirst()]
Strings = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
PromptField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]


def _one_of(names: Iterable[str]) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "enum": list(names)})


Biases = Annotated[
    Any, WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})
]
PriorityField = Annotated[Any, _one_of(Priority)]


class StrictBody(BaseModel):
    """Values must have the JSON types of their fields. Unknown fields are rejected with advice."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(StrictBody):
    """Fields that a stream carries besides text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis; never added here
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(StrictBody):
    """A JSON schema in OpenAI's form."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictBody):
    """Constrains the form of the answer, in OpenAI's way, and by vLLM's structural tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None  # of a structural tag
    structures: list[dict[str, Any]] | None = None  # the older form of one, with `triggers`
    triggers: Texts | None = None


class StructuredOutputs(StrictBody):
    """Constrains the form of the answer, in vLLM's way; set one field."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None


class PlacementOptions(StrictBody):
    """Wishes for the placement of the request; only Trivium has them."""

    model_config = ConfigDict(extra="forbid")

    policy: Annotated[Any, _one_of(POLICIES)] = None
    orchestration: Annotated[Any, _one_of(ORCHESTRATIONS)] = None


class ProbesBody(StrictBody):
    """Searches during the answer: their trigger, number and limits."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    # built in or installed; `streams/calls/wishes.py` checks it
    trigger: str | None = Field(None, min_length=1, max_length=TRIGGER_CHARS_MAX)
    every: Whole | None = Field(None, ge=1, le=_INT_32_MAX)  # least tokens between two probes
    lookahead: Whole | None = Field(None, ge=0, le=_INT_32_MAX)  # tokens before its place
    max: Whole | None = Field(None, ge=1, le=PROBES_MAX)  # probes of one answer
    k: Whole | None = Field(None, ge=1, le=PASSAGES_MAX)  # passages of one probe at most
    min_score: float | None = Field(None, ge=-1, le=1)  # cosine similarity
    tokens_max: Whole | None = Field(None, ge=1, le=_INT_32_MAX)  # of all probes' passages
    stall_ms: Whole | None = Field(None, ge=0, le=STALL_MS_MAX)  # longest wait for a probe
    warm: bool | None = None  # whether a probe's search starts from the result of the last one


def _expand_probes(value: Any) -> Any:
    """Expand `true` to the defaults, and a number to the tokens between two probes."""
    if isinstance(value, bool):
        return {} if value else None
    return {"every": value} if isinstance(value, int) else value


Probes = Annotated[
    ProbesBody | None,
    BeforeValidator(
        _expand_probes,
        json_schema_input_type=bool | Annotated[int, Field(ge=1)] | ProbesBody | None,
    ),
]


class SearchBody(StrictBody):
    """A search whose passages are put into a chat's prompt; only Trivium has it."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    collection: str = Field(min_length=1, max_length=COLLECTION_CHARS_MAX, pattern="^[^/]*$")
    k: Whole | None = Field(None, ge=1, le=PASSAGES_MAX)  # largest number of passages
    mode: Literal["vector", "words", "hybrid"] | None = None
    filter: dict[str, Any] | Annotated[str, Field(max_length=65_536)] | None = None  # over metadata
    min_score: float | None = Field(None, ge=-1, le=1)  # cosine similarity
    query: str | None = None  # text to search for; default: the last user message
    tokens_max: Whole | None = Field(None, ge=1, le=_INT_32_MAX)  # tokens of all passages together
    probes: Probes = None


class CacheBody(StrictBody):
    """Whether the answer may come from the response cache, and may be stored there."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    enabled: bool | None = None
    threshold: float | None = Field(None, ge=0, le=1)  # least similarity of the two questions
    ttl_s: Whole | None = Field(None, ge=1, le=TTL_S_MAX)


Cache = Annotated[
    CacheBody | None,
    BeforeValidator(
        lambda value: {"enabled": value} if isinstance(value, bool) else value,
        json_schema_input_type=bool | CacheBody | None,
    ),
]


class GenerationBody(StrictBody):
    """The fields that chats and completions share."""

    model: str | None = None  # default: the served model, as in vLLM
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: Whole | None = Field(None, ge=-1, le=_INT_32_MAX)
    min_p: float | None = Field(None, ge=0, le=1)
    n: Whole | None = Field(None, ge=1)
    seed: Whole | None = Field(None, ge=SEED_MIN, le=SEED_MAX)
    stop: Strings = None
    stop_token_ids: list[Whole] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Whole | None = Field(None, ge=0, le=_INT_32_MAX)
    max_tokens: Whole | None = Field(None, ge=1, le=_INT_32_MAX)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=1_000)
    logit_bias: Biases = None
    allowed_token_ids: list[Whole] | None = None
    bad_words: Texts | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Whole | None = Field(None, ge=-1, le=_INT_32_MAX)
    truncation_side: Literal["left", "right"] | None = None
    user: str | None = None
    session_id: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=CACHE_SALT_CHARS_MAX)] | None = None
    priority: PriorityField = None
    trivium: PlacementOptions | None = None

    @property
    def names_form(self) -> bool:
        """Return whether the body constrains the form of the answer (`form.py`)."""
        guided = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        forms = (self.response_format, self.structured_outputs, *guided)
        return any(form is not None for form in forms)


class Message(StrictBody):
    """A message of a chat; content is text or a list of text parts. The model's template may accept
    more roles than OpenAI's."""

    role: str = Field(min_length=1, max_length=64)
    content: str | Annotated[list[dict[str, Any]], _FailFirst()] | None = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], _FailFirst()] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None  # OpenAI's older form of one tool call


class TemplateFields(StrictBody):
    """Fields for the model's chat template besides the messages."""

    tools: Annotated[list[dict[str, Any]], _FailFirst()] | None = None
    tool_choice: Any = None
    functions: Annotated[list[dict[str, Any]], _FailFirst()] | None = None  # OpenAI's older form
    function_call: Any = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def names_tools(self) -> bool:
        """Return whether the body has tools, or a choice among them (`tools.py`)."""
        return bool(self.tools or self.functions or self.tool_choice or self.function_call)


class ChatBody(TemplateFields, GenerationBody):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], _FailFirst()] = Field(min_length=1, max_length=MESSAGES_MAX)
    max_completion_tokens: Whole | None = Field(None, ge=1, le=_INT_32_MAX)
    logprobs: bool | None = None
    top_logprobs: Whole | None = Field(None, ge=0, le=20)
    thinking_token_budget: Whole | None = Field(None, ge=-1, le=_INT_32_MAX)
    retrieval: SearchBody | None = None
    cache: Cache = None


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    prompt: PromptField
    logprobs: Whole | None = Field(None, ge=0, le=20)
    add_special_tokens: bool | None = None
    echo: bool | None = None  # whether the prompt's text precedes the answer's


class TokenizeBody(TemplateFields):
    """The body of POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: (
        Annotated[list[Message], _FailFirst(), Field(min_length=1, max_length=MESSAGES_MAX)] | None
    ) = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(StrictBody):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


def parse(kind: type[Body], raw: bytes, values_max: int = VALUES_MAX) -> Body:
    """Parse a body into its model; raises InvalidRequest.

    Reading a value takes microseconds, so the number of values is checked before any is read.
    """
    raw = raw.removeprefix(BYTE_ORDER_MARK)
    if (values := values_of(raw, values_max)) > values_max:
        raise InvalidRequest(f"the body: expected at most {values_max} values, found {values}")
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error) from error


def values_of(raw: bytes, enough: int) -> int:
    """Return an upper bound of a JSON text's number of values; exact if it exceeds `enough`."""
    count = sum(map(raw.count, _SEPARATORS))
    if count <= enough:
        return count
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # without escaped quotes
    outside = b"".join(bare.split(b'"')[::2])
    return sum(map(outside.count, _SEPARATORS))


def priority_of(settings: GatewaySettings, value: Any, param: str) -> str | None:
    """Return a priority class by its name; None for vLLM's default 0. `param` names the field in
    errors."""
    return None if value is None or value == 0 else one_of(settings.priorities, value, param)


def one_of(names: Sequence[str], value: Any, param: str) -> str | None:
    """Return a value that is among the names, or None; raises InvalidRequest that names `param`."""
    if value is None:
        return None
    if value not in names:
        raise InvalidRequest(
            f"{param}: expected one of {', '.join(names)}, found {shorten(value)}", param
        )
    return str(value)


def strings(name: str, value: Any, count_max: int, chars_max: int) -> tuple[str, ...]:
    """Return a string or a list of strings as a tuple, within bounds; raises InvalidRequest."""
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else value
    if isinstance(values, list) and len(values) > count_max:
        raise InvalidRequest(f"{name}: expected at most {count_max}, found {len(values)}", name)
    if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
        raise InvalidRequest(
            f"{name}: expected a string or a list of strings, none of them empty, "
            f"found {shorten(value)}",
            name,
        )
    longest = max(map(len, values), default=0)
    if longest > chars_max:
        raise InvalidRequest(
            f"{name}: expected at most {chars_max} characters, found {longest}", name
        )
    return tuple(values)
