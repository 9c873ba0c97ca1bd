"""Makes substitutes for words that a recording leaves out, and puts them into records.

Tokens become digests of all tokens up to there, keyed by a salt that is never stored. So prompts
share exactly as long a prefix as before, and no reader can test guesses of what they said. Texts
become as many bytes of x, names become digests. Fields with words are found by name: a name means
the same in all records. Called by `redacting.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from hashlib import blake2b
from typing import Any, TypeVar

from schemas.records import KvEvents

_TOKEN_BYTES = 4
_NAME_CHARS = 16
_HASH_BYTES = 8
TOKENS = frozenset({"prompt_tokens", "tokens", "lead", "joint", "trail", "tail"})
TEXTS = frozenset(
    "query filter text title source stop bad_words value message tools tool_choice "
    "template_kwargs".split()
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
_EMPTIED = ("logit_bias", "allowed_token_ids")  # token ids that say what an answer is about
T = TypeVar("T")


class StandIns:
    """Substitutes under one salt; `cell_tokens` is the granularity at which prompts differ."""

    def __init__(self, salt: bytes, cell_tokens: int) -> None:
        self._salt, self._cell_tokens = salt, cell_tokens

    def tokens(self, packed: bytes) -> bytes:
        """Return zeros, with a digest of all tokens so far as the last token of each whole cell."""
        cell_bytes = self._cell_tokens * _TOKEN_BYTES
        digest = blake2b(key=self._salt, digest_size=_TOKEN_BYTES)
        stand_in = bytearray(len(packed))
        for end in range(cell_bytes, len(packed) + 1, cell_bytes):
            digest.update(packed[end - cell_bytes : end])
            stand_in[end - _TOKEN_BYTES : end] = digest.copy().digest()
            stand_in[end - 1] &= 0x7F  # token ids are not negative
        return bytes(stand_in)

    def name(self, name: str) -> str:
        """Return the substitute of a name."""
        return blake2b(name.encode(), key=self._salt, digest_size=_NAME_CHARS // 2).hexdigest()

    def block(self, value: int) -> int:
        """Return the substitute of a block hash whose prompt is unknown."""
        digest = blake2b(value.to_bytes(_HASH_BYTES), key=self._salt, digest_size=_HASH_BYTES)
        return int.from_bytes(digest.digest())


def blank_text(text: str) -> str:
    """Return as many bytes of x as the text has."""
    return "x" * len(text.encode())


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
        if name in _EMPTIED:
            return {} if isinstance(value, Mapping) else kind()
        if isinstance(value, tuple | list):
            substitutes = [self._value(name, part, whole) for part in value]
            same = all(new is old for new, old in zip(substitutes, value, strict=True))
            return value if same else kind(substitutes)
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
