"""Checks whether quoted documents still have the quoted content."""

from collections.abc import Iterable

from schemas.records import Quoted
from schemas.retrieval import shard_of
from schemas.rules.metadata import TENANT
from workers.vector.fulltext.texts import row_id, unpack
from workers.vector.index.index import Index
from workers.vector.index.rows import Rows


def changed_quotes(
    quoted: Iterable[Quoted], index: Index | None, tenant: str, shard: int, shards: int
) -> tuple[str, ...]:
    """Return the quoted documents of this shard that are gone, changed, or not for the tenant.

    `index` is the collection's, None if the tenant may not search it.
    """
    own_quotes = {quote for quote in quoted if shard_of(quote.document_id, shards) == shard}
    rows = index.rows if index is not None else None
    names = {
        quote.document_id
        for quote in own_quotes
        if rows is None
        or not quote.content
        or content(rows, quote.document_id, tenant) != quote.content
    }
    return tuple(sorted(names))


def content(rows: Rows, document_id: str, tenant: str) -> str:
    """Return the content hash of a document's passages; empty if the tenant may find none."""
    row = rows.row_of.get(row_id(document_id, 0))
    if row is None or (tenant and not rows.columns.has_or_lacks(TENANT, tenant, row)):
        return ""
    return unpack(rows.payloads[row]).content
