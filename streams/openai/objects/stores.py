"""A vector store and its files: desired states, results, and sums over all files. Pure.

Sums are updated with each record. So no call reads all files, of which a store may have as many as
a tenant may store.
"""

import json
from collections import Counter
from dataclasses import dataclass, field

from schemas.records import FileBatch, StoreFile, StoreFileResult, VectorStore
from schemas.rules.metadata import is_number
from streams.openai.objects.ordered_ids import OrderedIds

PRESENT, CANCELLED, DELETED = "present", "cancelled", "deleted"  # desired states of a file
IN_PROGRESS, COMPLETED, FAILED = "in_progress", "completed", "failed"
STATUSES = (IN_PROGRESS, COMPLETED, FAILED, CANCELLED)


@dataclass(slots=True)
class StoreEntry:
    """A file of a store: its desired state, and the result."""

    spec: StoreFile
    result: StoreFileResult | None = None

    @property
    def status(self) -> str:
        """Return the status that callers see."""
        if self.spec.target_state == CANCELLED:
            return CANCELLED
        if self.result is None or self.result.revision != self.spec.revision:
            return IN_PROGRESS
        return self.result.status

    @property
    def is_done(self) -> bool:
        """Return whether the log has the desired state, as long as the store exists."""
        if self.spec.target_state == CANCELLED:
            return self.result is None or not self.result.documents
        return self.spec.target_state == PRESENT and self.status != IN_PROGRESS


def kind_of(status: str, batch_id: str) -> str:
    """Name the kind of files with a status, from a batch, or both; empty parts match all."""
    return f"{status} {batch_id}".strip()


@dataclass(slots=True)
class Store:
    """A vector store with its files, results and file batches."""

    record: VectorStore | None = None
    used_ms: int = 0
    files: dict[str, StoreFile] = field(default_factory=dict)
    results: dict[str, StoreFileResult] = field(default_factory=dict)
    batches: dict[str, FileBatch] = field(default_factory=dict)
    # Of files that are not deleted. A file's kinds are its status, its batch, and both together.
    order: OrderedIds = field(default_factory=OrderedIds)
    usage_bytes: int = 0  # of files that are not deleted
    _counts: dict[str, Counter[str]] = field(default_factory=dict)  # by batch, "": all; by status
    _kinds: dict[str, Counter[bool]] = field(default_factory=dict)  # files by attribute, and kind
    _contributions: dict[str, tuple[str, int, dict[str, bool]]] = field(default_factory=dict)

    @property
    def is_there(self) -> bool:
        """Return whether its owner has created it, and not deleted it."""
        return self.record is not None and not self.record.deleted

    def is_empty(self) -> bool:
        """Return whether the table has no record of it."""
        return not (self.record or self.files or self.results or self.batches or self.used_ms)

    def entry(self, file_id: str) -> StoreEntry | None:
        """Return a file of the store, or None if it has none or it is deleted."""
        spec = self.files.get(file_id)
        if spec is None or spec.target_state == DELETED:
            return None
        return StoreEntry(spec, self.results.get(file_id))

    def counts(self, batch_id: str = "") -> Counter[str]:
        """Return the number of its files, or those of a batch, by status."""
        return self._counts.get(batch_id, Counter())

    def kinds(self) -> dict[str, bool]:
        """Return by attribute whether its values are numbers."""
        return {key: files[True] > 0 for key, files in self._kinds.items() if files.total()}

    def put_file(self, record: StoreFile) -> None:
        """Set the desired state of a file."""
        self.files[record.file_id] = record
        self._update_sums(record.file_id)

    def put_result(self, record: StoreFileResult) -> None:
        """Set the result of a file."""
        self.results[record.file_id] = record
        self._update_sums(record.file_id)

    def drop_file(self, file_id: str) -> None:
        """Remove the desired state of a file."""
        self.files.pop(file_id, None)
        self._update_sums(file_id)

    def drop_result(self, file_id: str) -> None:
        """Remove the result of a file."""
        self.results.pop(file_id, None)
        self._update_sums(file_id)

    def _update_sums(self, file_id: str) -> None:
        """Update the sums after a change of one file."""
        if (contribution := self._contributions.pop(file_id, None)) is not None:
            self._add(*contribution, -1)
        entry = self.entry(file_id)
        if entry is None:
            self.order.drop(file_id)
            return
        spec, result = entry.spec, entry.result
        attributes = json.loads(spec.attributes or "{}")
        contribution = (
            f"{entry.status} {spec.batch_id}",
            result.usage_bytes if result is not None else 0,
            {key: is_number(value) for key, value in attributes.items()},
        )
        self._contributions[file_id] = contribution
        self._add(*contribution, 1)
        status, batch_id = entry.status, spec.batch_id
        kinds = {kind_of(status, ""), kind_of("", batch_id), kind_of(status, batch_id)}
        self.order.add(file_id, spec.created_ms, *sorted(kinds - {""}))

    def _add(self, what: str, usage_bytes: int, kinds: dict[str, bool], files: int) -> None:
        status, _, batch_id = what.partition(" ")
        self.usage_bytes += files * usage_bytes
        for batch in {"", batch_id}:
            counts = self._counts.setdefault(batch, Counter())
            counts[status] += files
            if not counts.total():
                del self._counts[batch]
        for key, is_a_number in kinds.items():
            of_key = self._kinds.setdefault(key, Counter())
            of_key[is_a_number] += files
            if not of_key.total():
                del self._kinds[key]
