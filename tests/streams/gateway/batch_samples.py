"""Lines of batches."""

import json
from typing import Any

from streams.openai.batches.lines import ENDPOINTS
from tests.streams.gateway.samples import MODEL


def line(custom_id: Any = "a", url: str = ENDPOINTS[0], **fields: Any) -> dict[str, Any]:
    """A call as files have it."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"Of {custom_id}?"}]}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **fields}


def file_of(*lines: Any) -> bytes:
    """A file of such lines, or of bytes as they are."""
    return b"\n".join(
        line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines
    )
