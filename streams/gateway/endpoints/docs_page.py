"""`/docs`: the OpenAPI document as one page that loads nothing else and works without the internet.

The page can be saved. Swagger UI comes from a Python package. The page is built and compressed
once; a browser that has it cached gets status 304.
"""

import asyncio
import gzip
import hashlib
import importlib.resources
import json
from collections.abc import Callable
from functools import cached_property
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Trivium: the API over HTTP</title>
<style>{style}</style>
</head>
<body>
<div id="docs"></div>
<script>{program}</script>
<script>
SwaggerUIBundle({{dom_id: "#docs", deepLinking: true, validatorUrl: null, spec: {document}}});
</script>
</body>
</html>
"""


class DocsPage:
    """Serves the OpenAPI page; `answer` is the endpoint."""

    def __init__(self, document: Callable[[], dict[str, Any]]) -> None:
        self._document = document

    async def answer(self, request: Request) -> Response:
        """Return the page, compressed if the client accepts gzip."""
        packed, tag = await asyncio.to_thread(lambda: self._packed)
        headers = {"etag": tag, "cache-control": "no-cache", "vary": "accept-encoding"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            page = await asyncio.to_thread(gzip.decompress, packed)
            return Response(page, headers=headers, media_type="text/html")
        headers["content-encoding"] = "gzip"
        return Response(packed, headers=headers, media_type="text/html")

    @cached_property
    def _packed(self) -> tuple[bytes, str]:
        """Build the compressed page and its ETag."""
        static = importlib.resources.files("fastapi_offline") / "static"
        style = (static / "swagger-ui.css").read_text(encoding="utf-8")
        program = _inside((static / "swagger-ui-bundle.js").read_text(encoding="utf-8"))
        document = _inside(json.dumps(self._document()))
        page = _PAGE.format(style=style, program=program, document=document).encode()
        return gzip.compress(page, mtime=0), f'W/"{hashlib.sha256(page).hexdigest()[:16]}"'


def _inside(script: str) -> str:
    """Escape the texts that would end a script element; all of them are in strings and patterns."""
    for opening in ("<!--", "<script", "</script"):
        script = script.replace(opening, "\\x3c" + opening[1:])
    return script
