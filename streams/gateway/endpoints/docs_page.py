"""`/docs`: the OpenAPI document as one page that asks nobody for anything, so it can be saved, and
works without the internet. Swagger UI comes in a Python package."""

import importlib.resources
import json
from functools import cache
from typing import Any

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


def docs_page(document: dict[str, Any]) -> str:
    """The whole page."""
    style, program = _swagger_ui()
    return _PAGE.format(style=style, program=program, document=_inside(json.dumps(document)))


@cache
def _swagger_ui() -> tuple[str, str]:
    static = importlib.resources.files("fastapi_offline") / "static"
    style = (static / "swagger-ui.css").read_text(encoding="utf-8")
    return style, _inside((static / "swagger-ui-bundle.js").read_text(encoding="utf-8"))


def _inside(script: str) -> str:
    """Without what would end a script's element; all of it is in strings and patterns."""
    for opening in ("<!--", "<script", "</script"):
        script = script.replace(opening, "\\x3c" + opening[1:])
    return script
