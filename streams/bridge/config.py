"""Section [bridge]: topic pairs for prompts and answers, limits, and topics of document rows.

A pair is a table `[[bridge.pairs]]`. Two always exist: `prompts` with `answers`, which a table may
configure, and `batch.prompts` with `batch.answers`, the lines of /v1/batches.

Every process reads all sections, so the modules that check a schema or a search are imported only
if a pair has one.
"""

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo

from schemas.errors import ConfigError, InvalidRequest
from schemas.records import Priority
from schemas.rules import filters
from schemas.rules.numbers import SEED_MAX, SEED_MIN
from schemas.sections import Positive, Share, Texts, describe_errors, one_of, section, tables_of
from schemas.topics import TOPICS, live_ms_max
from streams.bridge.records.template import Template

FORMATS = ("prompt", "json", "json_envelope", "avro")
TopicName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,245}$")]  # with room for .dlq


def _json_text(value: Any, info: ValidationInfo) -> Any:
    """Return JSON as text; it is given as tables, as JSON, or as the name of a file."""
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str) or not value or value.lstrip()[:1] in ("{", "["):
        return value
    try:
        return Path(value).read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"bridge.pairs: {info.field_name}: no readable file {value!r}: {error}"
        ) from error


@section("bridge.pairs")
class TopicPair:
    """One topic of prompts, and how they are answered."""

    prompts: TopicName
    answers: TopicName
    name: str = ""  # in figures and messages; empty: the topic of prompts
    model: str = ""  # empty: the deployment's; MODEL@COLLECTION searches a collection
    # Text with {fields} of the value, which may then be any record or JSON object; empty: values
    # are prompts themselves.
    template: str = ""
    metadata: Texts = ()  # with a template: fields of the value that the answer repeats
    system: str = ""  # system message for prompts without one
    # JSON schema of the answers: a table, JSON, or the name of a file
    schema: Annotated[str, BeforeValidator(_json_text)] = ""
    # JSON list of the tools that the model may call: tables, JSON, or the name of a file; and the
    # choice among them, as in chats
    tools: Annotated[str, BeforeValidator(_json_text)] = ""
    tool_choice: str = ""
    retrieval: dict[str, Any] | None = None  # the search before the answer, as in chats
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Positive | None = None
    seed: Annotated[int, Field(ge=SEED_MIN, le=SEED_MAX)] | None = None
    stop: Texts = ()
    # priority of prompts without one, and the most urgent one that a prompt can get;
    # gateway.priority_max bounds it too
    priority: Annotated[str, one_of(*Priority)] = Priority.BATCH.value
    priority_max: Annotated[str, one_of(*Priority)] = Priority.INTERACTIVE.value
    deadline_ms: Positive = 600_000  # of one prompt, from its first try
    ordered: bool = False  # a prompt waits for the answer to the previous one with its key
    format: Annotated[str, one_of(*FORMATS)] = "prompt"  # of answers; prompt: that of the prompt
    fallback: str | None = None  # text of the answer after an error
    parts: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{0,249}$")] = ""  # topic of partial text
    tries_max: Positive = 5
    body: bool = False  # whether answers contain the OpenAI API's response body

    def __post_init__(self) -> None:
        if self.prompts in (self.answers, self.parts) or self.answers == self.parts:
            raise self._wrong("topics", "expected different ones for prompts, answers and parts")
        if self.deadline_ms > live_ms_max():
            raise self._wrong("deadline_ms", f"expected at most {live_ms_max()}")
        if self.metadata and not self.template:
            raise self._wrong("metadata", "expected a template, too: prompts have their own")
        try:
            Template(self.template)
        except ConfigError as error:
            raise self._wrong("template", error.message) from error
        self._check_retrieval()
        self._check_schema()
        self._check_tools()

    @property
    def title(self) -> str:
        """Return the pair's name, or its topic of prompts."""
        return self.name or self.prompts

    def _wrong(self, field: str, why: str) -> ConfigError:
        return ConfigError(f"bridge.pairs ({self.title}): {field}: {why}")

    def _check_retrieval(self) -> None:
        if self.retrieval is None:
            return
        from streams.calls.request.body import SearchBody

        try:
            filters.text_of(SearchBody.model_validate(self.retrieval).filter)
        except ValidationError as error:
            raise self._wrong("retrieval", describe_errors("", error)) from None
        except InvalidRequest as error:
            raise self._wrong("retrieval", error.message) from error

    def _check_schema(self) -> None:
        if not self.schema:
            return
        from jsonschema import SchemaError  # type: ignore[import-untyped]  # ships no types
        from jsonschema import ValidationError as JsonInvalid
        from jsonschema.validators import Draft202012Validator  # type: ignore[import-untyped]

        field = "schema"
        try:
            schema = json.loads(self.schema)
            if not isinstance(schema, dict):
                raise ValueError(f"found {self.schema[:40]!r}")
            Draft202012Validator.check_schema(schema)
            if self.fallback is not None:
                field = "fallback"
                Draft202012Validator(schema).validate(json.loads(self.fallback))
        except (SchemaError, JsonInvalid) as error:
            raise self._wrong(field, error.message) from None
        except (ValueError, RecursionError) as error:
            raise self._wrong(field, f"expected JSON, a schema as an object: {error}") from None

    def _check_tools(self) -> None:
        if not self.tools:
            if self.tool_choice:
                raise self._wrong("tool_choice", "expected tools, too: prompts have their own")
            return
        from streams.calls.request.body import TemplateFields
        from streams.calls.request.tools import check_tools

        choice = self.tool_choice or None
        field = "tools"
        try:
            tools = json.loads(self.tools)
            field = "tool_choice"
            choice = json.loads(choice) if choice and choice.startswith("{") else choice
            check_tools(TemplateFields.model_validate({"tools": tools, "tool_choice": choice}))
        except ValidationError as error:
            raise ConfigError(
                f"bridge.pairs ({self.title}): {describe_errors('', error)}"
            ) from None
        except InvalidRequest as error:
            raise ConfigError(f"bridge.pairs ({self.title}): {error.message}") from error
        except (ValueError, RecursionError) as error:
            raise self._wrong(field, f"expected JSON: {error}") from None


@section("bridge.documents")
class DocumentSource:
    """One topic of rows, as change streams write them, and their mapping to documents."""

    topic: TopicName
    collection: Annotated[str, Field(pattern=r"^[^/]+$")]
    text: str = "{text}"  # with {fields} of the row; a row without text cannot be found
    # With {fields} of the key, because a deleted row has nothing else; empty: its only field.
    id: str = ""
    metadata: Texts = ()  # fields for filters and citations
    tenant: str = ""  # the only tenant that can find it: a text with {fields}

    def __post_init__(self) -> None:
        for name in ("text", "id", "tenant"):
            try:
                Template(getattr(self, name))
            except ConfigError as error:
                where = f"bridge.documents ({self.topic}): {name}"
                raise ConfigError(f"{where}: {error.message}") from error


@section("bridge")
class BridgeSettings:
    """Section [bridge]: topic pairs, document sources, and limits of requests at once."""

    pairs: Annotated[tuple[TopicPair, ...], tables_of(TopicPair)] = ()
    documents: Annotated[tuple[DocumentSource, ...], tables_of(DocumentSource)] = ()
    in_flight_max: Positive = 512  # requests of one bridge at once
    share: Share = 0.8  # of the credits that workers grant, for all bridges together

    def __post_init__(self) -> None:
        answers = {pair.prompts: pair.answers for pair in self.pairs}
        if len(answers) < len(self.pairs):
            topics = [pair.prompts for pair in self.pairs]
            twice = next(topic for topic in topics if topics.count(topic) > 1)
            raise ConfigError(f"bridge.pairs: expected one pair of {twice!r}, found several")
        for first in answers:  # answers may be another pair's prompts, but without a cycle
            topic = answers[first]
            for _ in answers:
                if topic == first:
                    raise ConfigError(f"bridge.pairs: {first!r} gets prompts from its own answers")
                topic = answers.get(topic, "")
        if len({source.topic for source in self.documents}) < len(self.documents):
            raise ConfigError("bridge.documents: expected each topic once")


def pairs_of(settings: BridgeSettings, prefix: str = "") -> tuple[TopicPair, ...]:
    """Return all pairs with full topic names: the configured ones, and those that always exist.

    `prefix` is that of Trivium's own topics. Raises ConfigError for pairs that would use them.
    """
    own_topics = {prefix + name for name in TOPICS}
    lines = TopicPair(
        prompts=f"{prefix}batch.prompts",
        answers=f"{prefix}batch.answers",
        priority_max=Priority.BATCH.value,
        format="avro",
        body=True,
    )
    usual = TopicPair(prompts=f"{prefix}prompts", answers=f"{prefix}answers")
    open_to_all = {prefix + name for name in ("prompts", "answers", "answers.parts")}
    for pair in settings.pairs:
        for topic in {pair.prompts, pair.answers, pair.parts} & own_topics - open_to_all:
            raise ConfigError(f"bridge.pairs ({pair.title}): {topic!r} is a topic of Trivium's own")
    prompt_topics = {pair.prompts for pair in settings.pairs}
    return (*settings.pairs, *(() if usual.prompts in prompt_topics else (usual,)), lines)
