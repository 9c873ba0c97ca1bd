"""Follows the topic `passages`, where the embedding pool writes passages of text documents.

It is read after `documents`: passages that exist at the start count only for documents that still
come as text. Invalid passages, and those by another model than their collection's, go to the
dead-letter topic.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiokafka import ConsumerRecord

from schemas.errors import RecordError
from schemas.records import DocumentPassages
from schemas.rules.sizes import CHUNKS_MAX, check_size
from schemas.topics import check_record, document_key
from workers.retrieval.feed.follower import FeedFollower
from workers.retrieval.passages.changes import Failures, PassagesChange, names_of


class PassageFollower(FeedFollower[PassagesChange]):
    """The follower of `passages`: `start` after the documents are read, then `run`."""

    topic = "passages"
    history_batch, batch_max = 1_000, 64

    def __init__(self, *parts: Any, read_to: Callable[[], Mapping[int, int]]) -> None:
        """Set up a follower; `read_to` returns the next offsets of `documents`, by partition."""
        super().__init__(*parts)
        self._read_to = read_to

    async def _change(self, record: ConsumerRecord) -> PassagesChange:
        read_to = self._read_to().get(record.partition, 0)
        if not record.value:
            return PassagesChange(*names_of("passages", record.key), None, read_to)
        output = self._codec.decode(record.value)
        check_record("passages", output)
        assert isinstance(output, DocumentPassages)
        check_size(output, len(record.value))
        self._check_key(record, document_key(output.collection, output.document_id))
        if len(output.chunks) > CHUNKS_MAX:
            raise RecordError(
                f"passages: expected at most {CHUNKS_MAX} of a document, found {len(output.chunks)}"
            )
        for chunk in output.chunks:
            if len(chunk.vector) % 4 or not chunk.vector or len(chunk.tokens) % 4:
                raise RecordError(
                    "passages: expected vectors of float32 and tokens of int32, found "
                    f"{len(chunk.vector)} and {len(chunk.tokens)} bytes"
                )
        return PassagesChange(output.collection, output.document_id, output, read_to)

    def _apply_changes(self, changes: Sequence[PassagesChange]) -> Failures[PassagesChange]:
        return self._collections.apply_passages(changes)
