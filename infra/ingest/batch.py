"""Makes `Document` records from files, and lists what was refused and why."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.ingest.files import FileSource, read
from schemas.errors import InvalidRequest
from schemas.records import Document
from schemas.rules.metadata import Kinds, check_metadata, metadata_of
from schemas.rules.sizes import DOCUMENT_CHARS_MAX, NAME_CHARS_MAX
from streams.parsing.document import ParsedDocument, Unreadable


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The collection that documents go to, and the fields that all of them get."""

    collection: str
    tenant: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A file or line that was not ingested, and the reason."""

    path: str  # with the line, if it is a line
    reason: str


class SourceReader:
    """Reads files into documents; two files never share an id."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._owners: dict[str, Path] = {}  # file of each id
        self._kinds: Kinds = {}  # types of fields, from the documents so far

    async def documents(
        self, source: FileSource, now_ms: int
    ) -> tuple[list[Document], list[Refusal]]:
        """Read one file as it is now; call `forget` for its former ids that are gone."""
        by_id: dict[str, Document] = {}
        label, mtime = _display_path(source.path), _mtime(source.path)
        try:
            documents, refused = await read(source.path), list[Refusal]()
        except Unreadable as error:
            documents, refused = [], [Refusal(label, str(error))]
        for parsed in documents:
            name = parsed.document_id or source.name
            if parsed.place and not parsed.document_id:
                name += "/" + parsed.place.rpartition(" ")[2]
            is_taken = name in by_id or self._owners.get(name, source.path) != source.path
            facts: dict[str, Any] = {"title": parsed.title or source.path.stem}
            facts |= {"source": label, "mtime": mtime, **parsed.metadata, **self.target.metadata}
            metadata = json.dumps(facts, ensure_ascii=False)
            wrong = parsed.wrong or _refusal_reason(parsed, name, is_taken) or self._check(metadata)
            if wrong:
                where = f"{label}, {parsed.place}" if parsed.place else label
                refused.append(Refusal(where, wrong))
                continue
            by_id[name] = Document(
                document_id=name,
                collection=self.target.collection,
                text=parsed.text,
                metadata=metadata,
                tenant=parsed.tenant or self.target.tenant,
                at_ms=now_ms,
            )
        self._owners |= dict.fromkeys(by_id, source.path)
        return list(by_id.values()), refused

    def _check(self, metadata: str) -> str:
        """Return what is wrong with the metadata, given all earlier ones; empty if nothing is."""
        kinds = dict(self._kinds)
        try:
            check_metadata(metadata_of(metadata), kinds)
        except InvalidRequest as error:
            return error.message
        self._kinds = kinds
        return ""

    def forget(self, path: Path, kept_ids: Iterable[str] = ()) -> list[str]:
        """Forget and return the ids of a file or folder that are not in `kept_ids`."""
        kept_ids = set(kept_ids)
        removed_ids = [
            name
            for name, owner in self._owners.items()
            if name not in kept_ids and (owner == path or owner.is_relative_to(path))
        ]
        for name in removed_ids:
            del self._owners[name]
        return sorted(removed_ids)


def _display_path(path: Path) -> str:
    """Return the path relative to the working directory if it is below, in printable characters."""
    here = Path.cwd()
    short_path = path.relative_to(here) if path.is_relative_to(here) else path
    return os.fsencode(short_path.as_posix()).decode(errors="replace")


def _refusal_reason(parsed: ParsedDocument, name: str, is_taken: bool) -> str:
    """Return why a document is not ingested; empty if it is."""
    chars = len(parsed.text)
    try:
        name.encode()
    except UnicodeEncodeError:
        return "expected a name in UTF-8, found other bytes"
    if not parsed.text.strip():
        return "empty: expected a text with words"
    if chars > DOCUMENT_CHARS_MAX:
        return (
            f"too large: expected at most {DOCUMENT_CHARS_MAX} characters, found {chars}; divide it"
        )
    if len(name) > NAME_CHARS_MAX:
        return f"expected an id of at most {NAME_CHARS_MAX} characters, found {len(name)}"
    if is_taken:
        return f"the id {name!r} is taken by another document of this call"
    return ""


def _mtime(path: Path) -> int:
    """Return the file's time in seconds since 1970, or 0 if it is gone."""
    try:
        return int(path.stat().st_mtime)
    except OSError:
        return 0
