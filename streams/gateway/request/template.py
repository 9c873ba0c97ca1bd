"""Chat templates: Jinja in a sandbox, set up as the models' authors expect it.

The environment offers what Hugging Face's own renderer offers (block trimming, loop controls,
`raise_exception`, `strftime_now`, `tojson`, `generation` blocks), so templates render to the same
text. Renders; never tokenises.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from schemas.errors import ConfigError, InvalidRequest

Message = Mapping[str, Any]


class _GenerationBlocks(Extension):
    """`{% generation %}` marks the assistant's text for training; for serving it is just its
    content.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


# What a template raises over messages and variables that it does not expect.
_REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "self", "loop")


class ChatTemplate:
    """One compiled template with the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template: Template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the model's chat template cannot be compiled: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._reserved = {*_RESERVED, *special_tokens, *environment.globals}

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text; raises InvalidRequest when the template refuses the messages, or a
        variable has a name that is the template's own.
        """
        for name in variables or ():
            if name in self._reserved:
                raise InvalidRequest(
                    f"chat_template_kwargs.{name}: the template's own name; leave it out",
                    f"chat_template_kwargs.{name}",
                )
        try:
            return self._template.render(
                **{
                    **self._special_tokens,
                    **(variables or {}),
                    "messages": messages,
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _REFUSALS as error:
            raise InvalidRequest(
                f"messages: the model's chat template refuses them: {error}", "messages"
            ) from error
