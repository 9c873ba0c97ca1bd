"""OpenAI's filters over a file's attributes, as the retrieval pool understands filters."""

from typing import Any

from schemas.errors import InvalidRequest
from streams.gateway.http.errors import shown

_COMPARISONS = ("eq", "ne", "gt", "gte", "lt", "lte", "in", "nin")
DEPTH_MAX = 16


def filter_of(value: Any, where: str, depth: int = 0) -> dict[str, Any]:
    """A ComparisonFilter or CompoundFilter as an expression; raises InvalidRequest."""
    if not isinstance(value, dict) or depth > DEPTH_MAX:
        what = "fewer levels" if isinstance(value, dict) else "an object"
        raise InvalidRequest(f"{where}: expected {what}, found {shown(value)}", where)
    match value:
        case {"type": "and" | "or" as join, "filters": [_, *_] as parts, **more} if not more:
            each = [filter_of(part, f"{where}.{i}", depth + 1) for i, part in enumerate(parts)]
            return {f"${join}": each}
        case {"type": str(name), "key": str(key), "value": wanted, **more} if not more:
            if name in _COMPARISONS and key and not key.startswith("$"):
                return {key: {f"${name}": wanted}}
    raise InvalidRequest(
        f"{where}: expected a comparison (type, key, value) or a compound (type, filters), found "
        f"{shown(value)}",
        where,
    )
