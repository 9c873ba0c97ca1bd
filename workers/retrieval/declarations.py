"""Operators' declarations of collections: their tenants, and the model that embeds them.

Every tenant may search a collection that has no declaration.
"""

from collections.abc import Iterable

from schemas.errors import InvalidRequest
from schemas.records import CollectionDeclared, DocumentPassages

DECLARED_MAX = 10_000


class CollectionDeclarations:
    """The newest declaration of each collection, by its name."""

    def __init__(self) -> None:
        self._by_name: dict[str, CollectionDeclared] = {}

    def set(self, name: str, declared: CollectionDeclared | None) -> None:
        """Set a collection's declaration, None to remove it; raises InvalidRequest."""
        if declared is None:
            self._by_name.pop(name, None)
            return
        if name not in self._by_name and len(self._by_name) >= DECLARED_MAX:
            raise InvalidRequest(f"{DECLARED_MAX} collections are declared already; take some back")
        self._by_name[name] = declared

    def list_all(self) -> Iterable[CollectionDeclared]:
        """Return the declarations of all collections."""
        return list(self._by_name.values())

    def clear(self) -> None:
        """Forget the declarations of all collections."""
        self._by_name.clear()

    def allows(self, name: str, tenant: str) -> bool:
        """Return whether a tenant may search a collection; an empty name is the operator's."""
        declared = self._by_name.get(name)
        return not tenant or declared is None or tenant in (declared.tenants or (tenant,))

    def embedder(self, name: str) -> str:
        """Return the model that a collection is declared for, empty for none."""
        declared = self._by_name.get(name)
        return declared.embedder if declared else ""

    def is_outdated(self, passages: DocumentPassages) -> bool:
        """Return whether passages are by another model, and older than the declaration."""
        declared = self._by_name.get(passages.collection)
        if declared is None or not declared.embedder:
            return False
        return passages.embedder != declared.embedder and passages.at_ms < declared.at_ms
