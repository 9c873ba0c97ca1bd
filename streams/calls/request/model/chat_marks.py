"""Marks the texts of callers in a chat, so that they name no control token (`schemas.model`).

A role may select tokens of the template, which some templates compose from it (`'<|' + role +
'|>'`). An answer in the history may contain names that the template searches for in answers, such
as `</think>`, unless they are special tokens. All other texts are plain text.
"""

from collections.abc import Iterator, Mapping, Set
from typing import Any

from jinja2 import nodes

from schemas.model.control_tokens import ControlTokens, Names

_LOOKING = set(  # methods of strings that search
    "split rsplit partition rpartition replace startswith endswith find rfind index rindex count "
    "strip lstrip rstrip removeprefix removesuffix".split()
)


class ChatMarks:
    """Marks the texts of callers in the chats of one model."""

    def __init__(
        self, control: ControlTokens, template: nodes.Template, special: Mapping[str, str]
    ) -> None:
        """Analyse a template. `special` has the special tokens' names by their use, such as
        `eos_token`."""
        texts = {data.data for data in template.find_all(nodes.TemplateData)}
        texts |= set(_constants(template))
        sought = set(_search_operands(template))
        in_answers = {
            name
            for name in control.names - control.special_names
            if any(name in text for text in sought)
        }
        composed = {name: set(_composed_words(name, texts)) for name in control.names}
        template_words = filter(
            _is_word, texts | {node.attr for node in template.find_all(nodes.Getattr)}
        )
        self._own_words = {*template_words} - control.names  # that the template compares with
        self._names, self._names_in_answers = control.without(()), control.without(in_answers)
        self._words = set[str]().union(*composed.values()) - self._own_words
        ends = control.names.intersection(special.values())
        self._no_roles = set[str]().union(*(composed[name] for name in ends))

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Mark the texts of a message."""
        role = message["role"]
        names = self._names_in_answers if role == "assistant" else self._names
        marked = {field: self._mark_value(value, names) for field, value in message.items()}
        return {**marked, "role": self._mark(role, self._names, self._no_roles)}

    def value(self, value: Any) -> Any:
        """Mark the texts in tools or variables."""
        return self._mark_value(value, self._names)

    def _mark_value(self, value: Any, names: Names) -> Any:
        if isinstance(value, str):
            return self._mark(value, names, self._words)
        if isinstance(value, Mapping):
            return {
                self._mark(name, names, self._words): self._mark_value(item, names)
                for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._mark_value(item, names) for item in value]
        return value

    def _mark(self, text: str, names: Names, words: Set[str]) -> str:
        return text if text in self._own_words and text not in words else names.mark(text, words)


def _constants(node: nodes.Node) -> Iterator[str]:
    """Yield the texts in a template's expressions."""
    return (const.value for const in node.find_all(nodes.Const) if isinstance(const.value, str))


def _search_operands(template: nodes.Template) -> Iterator[str]:
    """Yield the texts for which a template searches in other texts."""
    operands = list[nodes.Node]()
    for compare in template.find_all(nodes.Compare):
        operands += (compare.expr, *(side.expr for side in compare.ops))
    for called in template.find_all(nodes.Call):
        if isinstance(called.node, nodes.Getattr) and called.node.attr in _LOOKING:
            operands += called.args
    for filter_ in template.find_all(nodes.Filter):
        operands += filter_.args
    for operand in operands:
        if isinstance(operand, nodes.Const) and isinstance(operand.value, str):
            yield operand.value


def _composed_words(name: str, texts: Set[str]) -> Iterator[str]:
    """Yield the words from which a template composes this name, between two of its own texts."""
    begins = [i for i in range(1, len(name)) if any(text.endswith(name[:i]) for text in texts)]
    ends = [i for i in range(1, len(name)) if any(text.startswith(name[i:]) for text in texts)]
    for begin in begins:
        for end in ends:
            if begin < end and _is_word(name[begin:end]):
                yield name[begin:end]


def _is_word(text: str) -> bool:
    return text.replace("_", "").isalnum()
