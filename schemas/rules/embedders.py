"""Names of embedding models: NAME@VERSION, to which collections are bound, and NAME in calls."""


def public_name(embedder: str) -> str:
    """Return the name of an embedding model that callers use: the one without a version."""
    return embedder.partition("@")[0]
