"""Which embedding pool processes a record.

A deployment has a first embedding model, and may have more, each with a pool of workers: a consumer
group that reads all documents and searches, and processes those of its own collections. Calls and
searches name a model; else the declaration of a collection does. What names no other pool's model
is the first pool's.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from schemas.errors import ConfigError
from schemas.rules.embedders import public_name
from workers.embed.settings import EmbeddingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingPool:
    """A pool and the names of the other ones. The first pool's name is empty."""

    name: str = ""
    other_names: frozenset[str] = frozenset()

    @property
    def is_alone(self) -> bool:
        return not self.name and not self.other_names

    def handles(self, embedder: str) -> bool:
        """Return whether texts for an embedder, which may have a version, are this pool's."""
        name = public_name(embedder)
        return name == self.name if self.name else name not in self.other_names

    def check_embedder(self, embedder: str) -> None:
        """Raise ConfigError unless the pool's name is that of its embedder, and no other pool's."""
        name = public_name(embedder)
        if (self.name and name != self.name) or name in self.other_names:
            raise ConfigError(
                f"embedding.pools: expected different models, and names that are those of the "
                f"models, found {name!r}; set embedding.name or the name of the pool"
            )


def pool_of(settings: EmbeddingSettings, name: str) -> tuple[EmbeddingSettings, EmbeddingPool]:
    """Return the settings of a pool, and which records it handles; raises ConfigError."""
    tables = {pool.public_name: pool for pool in settings.pools}
    if not name:
        return settings.alone(), EmbeddingPool(other_names=frozenset(tables))
    if name not in tables:
        raise ConfigError(f"embedding.pools: expected {_list(tables)}, found {name!r}")
    other_names = frozenset(tables) - {name}
    return settings.of_pool(tables[name]), EmbeddingPool(name=name, other_names=other_names)


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
