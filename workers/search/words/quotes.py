"""Whether documents still say what somebody quoted of them."""

from collections.abc import Iterable

from schemas.records import Quoted
from schemas.retrieval import shard_of
from schemas.rules.metadata import TENANT
from workers.search.index.index import Index
from workers.search.index.rows import Rows
from workers.search.words.texts import row_id, unpack


def changed_quotes(
    quoted: Iterable[Quoted], index: Index | None, tenant: str, shard: int, shards: int
) -> tuple[str, ...]:
    """Documents of this shard that are gone, say something else, or are not for the tenant.

    `index` is that of the collection, None where the tenant may not search it.
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
    """Of which content the passages of a document are; empty where the tenant has none of it."""
    row = rows.row_of.get(row_id(document_id, 0))
    if row is None or (tenant and not rows.columns.has_or_lacks(TENANT, tenant, row)):
        return ""
    return unpack(rows.payloads[row]).content
