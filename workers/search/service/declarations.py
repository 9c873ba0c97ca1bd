"""What operators declared of collections: who may search them, by which model they are embedded.

A collection of which nothing is declared may be searched by every tenant.
"""

from collections.abc import Iterable

from schemas.errors import InvalidRequest
from schemas.records import CollectionDeclared, DocumentPassages

DECLARED_MAX = 10_000


class CollectionDeclarations:
    """By name of the collection; the last word counts."""

    def __init__(self) -> None:
        self._by_name: dict[str, CollectionDeclared] = {}

    def set(self, name: str, declared: CollectionDeclared | None) -> None:
        """What is said of a collection now; None: nothing any more."""
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
        """Whether somebody may search a collection; the operator, who is no tenant, may."""
        declared = self._by_name.get(name)
        return not tenant or declared is None or tenant in (declared.tenants or (tenant,))

    def embedder(self, name: str) -> str:
        """The model that a collection is bound to, empty where none was named."""
        declared = self._by_name.get(name)
        return declared.embedder if declared else ""

    def is_outdated(self, passages: DocumentPassages) -> bool:
        """Whether passages were made by a model that their collection was bound to before."""
        declared = self._by_name.get(passages.collection)
        if declared is None or not declared.embedder:
            return False
        return passages.embedder != declared.embedder and passages.at_ms < declared.at_ms
