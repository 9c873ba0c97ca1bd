"""Finds the fields of records that contain words, and replaces the words.

Fields are found by name: a name means the same in all records. Called by `redacting.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, TypeVar

from schemas.records import KvEvents

TOKENS = frozenset({"prompt_tokens", "tokens", "lead", "joint", "trail", "tail"})
TEXTS = frozenset(
    {"query", "filter", "text", "title", "source", "stop", "bad_words", "value", "message"}
)
DIGESTS = frozenset({"content"})  # not keyed: a reader with the text could compute them
_SCOPES = frozenset({"session_id", "tenant", "cache_scope"})
NAMES = _SCOPES | {
    "collection",
    "document_id",
    "passage_id",
    "changed",
    "known_passages",
    "passage_ids",
}
_BIAS = "logit_bias"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FieldSubstitutes:
    """Functions that return the substitute of each kind of value."""

    tokens: Callable[[bytes], bytes]
    text: Callable[[str], str]
    digest: Callable[[str], str]
    name: Callable[[str], str]

    def replace_in(self, record: T) -> T:
        """Return the record with words replaced, in nested records too; itself if it has none."""
        return self._record(record, whole=True)

    def replace_in_own_fields(self, record: T) -> T:
        """Return the record with words replaced, but not in nested records."""
        return self._record(record, whole=False)

    def _record(self, record: T, *, whole: bool) -> T:
        changes: dict[str, Any] = {}
        for name in fields_of(record):
            value = getattr(record, name)
            substitute = self._value(name, value, whole)
            if substitute is not value:
                changes[name] = substitute
        return replace(record, **changes) if changes else record  # type: ignore[type-var]  # a dataclass

    def _value(self, name: str, value: Any, whole: bool) -> Any:
        kind = type(value)
        if not value or isinstance(value, int | float):
            return value
        if kind is str:
            return self._string(name)(value)
        if kind is bytes:
            return self.tokens(value) if name in TOKENS else value
        if isinstance(value, tuple | list):
            substitutes = [self._value(name, part, whole) for part in value]
            same = all(new is old for new, old in zip(substitutes, value, strict=True))
            return value if same else kind(substitutes)
        if name == _BIAS and isinstance(value, Mapping):
            return {}
        return self._record(value, whole=whole) if whole and is_dataclass(kind) else value

    def _string(self, name: str) -> Callable[[str], str]:
        if name in TEXTS:
            return self.text
        if name in DIGESTS:
            return self.digest
        return self.name if name in NAMES else str


def names_in(record: Any) -> set[str]:
    """Return the names in the record's own fields."""
    names: set[str] = set()
    for field in NAMES.intersection(fields_of(record)):
        value = getattr(record, field)
        names.update([value] if isinstance(value, str) else value)
    return names - {""}


def fields_of(record: Any) -> tuple[str, ...]:
    """Return the names of fields that may contain words, or records with words."""
    is_wordless = isinstance(record, KvEvents) or not is_dataclass(record)
    return () if is_wordless else tuple(record.__dataclass_fields__)
