"""Files to `Document` records: one per document, with its key; and what was refused, and why."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.ingest.files import Source, read
from schemas.records import Document
from schemas.rules.sizes import DOCUMENT_CHARS_MAX, NAME_CHARS_MAX
from streams.parsing.parsed import Parsed, Unreadable


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where documents go, and what is said of all of them."""

    collection: str
    tenant: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refusal:
    """What is not ingested."""

    path: str  # with the line, if it is a line
    reason: str


class Reading:
    """Files that were read, and whose document each id is; no id is of two files."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._owners: dict[str, Path] = {}  # file of each id

    def documents(self, source: Source, now_ms: int) -> tuple[list[Document], list[Refusal]]:
        """Of one file as it is now; what it held before and holds no more is `gone`."""
        found: dict[str, Document] = {}
        refused: list[Refusal] = []
        shown, mtime = _shown(source.path), _mtime(source.path)
        for parsed in _parsed(source, refused):
            name = parsed.document_id or source.name
            is_taken = name in found or self._owners.get(name, source.path) != source.path
            if wrong := parsed.wrong or _wrong(parsed, name, is_taken):
                where = f"{shown}, {parsed.place}" if parsed.place else shown
                refused.append(Refusal(where, wrong))
                continue
            facts: dict[str, Any] = {"title": parsed.title or source.path.stem}
            facts |= {"source": shown, "mtime": mtime, **parsed.metadata, **self.target.metadata}
            found[name] = Document(
                document_id=name,
                collection=self.target.collection,
                text=parsed.text,
                metadata=json.dumps(facts, ensure_ascii=False),
                tenant=parsed.tenant or self.target.tenant,
                at_ms=now_ms,
            )
        self._owners |= dict.fromkeys(found, source.path)
        return list(found.values()), refused

    def gone(self, path: Path, kept: Iterable[str] = ()) -> list[str]:
        """Ids that came of a file, or of files below a folder, and are not among those kept."""
        kept = set(kept)
        lost = [
            name
            for name, owner in self._owners.items()
            if name not in kept and (owner == path or owner.is_relative_to(path))
        ]
        for name in lost:
            del self._owners[name]
        return sorted(lost)


def _parsed(source: Source, refused: list[Refusal]) -> Iterable[Parsed]:
    try:
        return read(source.path)
    except Unreadable as error:
        refused.append(Refusal(_shown(source.path), str(error)))
        return ()


def _shown(path: Path) -> str:
    """Below the working directory as one would name it."""
    here = Path.cwd()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else path.as_posix()


def _wrong(parsed: Parsed, name: str, taken: bool) -> str:
    """Why a document is not ingested, empty if it is."""
    chars = len(parsed.text)
    if not parsed.text.strip():
        return "empty: expected a text with words"
    if chars > DOCUMENT_CHARS_MAX:
        return (
            f"too large: expected at most {DOCUMENT_CHARS_MAX} characters, found {chars}; divide it"
        )
    if len(name) > NAME_CHARS_MAX:
        return f"expected an id of at most {NAME_CHARS_MAX} characters, found {len(name)}"
    if taken:
        return f"the id {name!r} is taken by another document of this call"
    return ""


def _mtime(path: Path) -> int:
    """Seconds since 1970; 0 where it is gone."""
    try:
        return int(path.stat().st_mtime)
    except OSError:
        return 0
