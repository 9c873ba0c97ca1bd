"""Checks structural tags: their shape, their nesting, and the schemas and patterns in them.

The shape is defined by xgrammar's own models. They are read from its file alone, because the whole
package imports torch, and takes half a gigabyte. Without xgrammar, which comes with vLLM, only the
rest is checked. `checks.py` runs this in the check process.
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from pydantic import ValidationError

NESTING_MAX = 80  # of objects and lists, as in vLLM
_MODULE = "structural_tag"


def tag_problem(
    text: str, check_schema: Callable[[str], str], check_pattern: Callable[[str], str]
) -> str:
    """Return why a JSON object is no structural tag, or an empty text."""
    tag = json.loads(text)
    if _depth(tag) > NESTING_MAX:
        return f"expected at most {NESTING_MAX} levels of objects and lists"
    if "structures" in tag:
        tag = _modern(tag)
    if tag.get("type") != "structural_tag" or not isinstance(tag.get("format"), dict):
        return "expected type structural_tag and an object as format"
    models = _models()
    if models is not None:
        try:
            models.StructuralTag.model_validate(tag)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            return f"{'.'.join(map(str, first['loc']))[:200]}: {first['msg'][:200]}"
    for part in _parts(tag["format"]):
        problem = _part_problem(part, check_schema, check_pattern)
        if problem:
            return f"{part['type']}: {problem}"
    return ""


def _depth(value: Any) -> int:
    """Return the nesting of a value, or one more than the largest allowed one."""
    layer, depth = [value], 0
    while layer and depth <= NESTING_MAX:
        nested = [part for part in layer if isinstance(part, dict | list)]
        layer = [
            inner
            for part in nested
            for inner in (part.values() if isinstance(part, dict) else part)
        ]
        depth += bool(nested)
    return depth


def _modern(tag: dict[str, Any]) -> dict[str, Any]:
    """Return a tag of the older form, with `structures` and `triggers`, in the present form."""
    structures = tag["structures"] if isinstance(tag["structures"], list) else [tag["structures"]]
    tags = [
        {
            **part,
            "type": "tag",
            "content": {"type": "json_schema", "json_schema": part.get("schema", {})},
        }
        if isinstance(part, dict)
        else part
        for part in structures
    ]
    triggered = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    return {"type": "structural_tag", "format": triggered}


@cache
def _models() -> Any:
    """Return xgrammar's module with the models of structural tags; None without xgrammar."""
    package = find_spec("xgrammar")
    if package is None or package.origin is None:
        return None
    spec = spec_from_file_location(_MODULE, Path(package.origin).with_name(f"{_MODULE}.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[_MODULE] = module = module_from_spec(spec)  # its models look up their names there
    spec.loader.exec_module(module)
    return module


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all formats in a format."""
    if isinstance(value, list):
        for part in value:
            yield from _parts(part)
    elif isinstance(value, dict):
        if isinstance(value.get("type"), str):
            yield value
        for field, part in value.items():
            if field != "json_schema":
                yield from _parts(part)


def _part_problem(
    part: dict[str, Any], check_schema: Callable[[str], str], check_pattern: Callable[[str], str]
) -> str:
    match part["type"]:
        case "json_schema" if isinstance(part.get("json_schema"), dict):
            return check_schema(json.dumps(part["json_schema"]))
        case "regex" if "\\p" not in str(part.get("pattern")).lower():
            return check_pattern(str(part.get("pattern")))
        case "triggered_tags":
            return _trigger_problem(part.get("tags"), part.get("triggers"))
    return ""


def _trigger_problem(tags: Any, triggers: Any) -> str:
    """Return which tag is not begun by exactly one trigger, if one is not."""
    if not isinstance(tags, list) or not isinstance(triggers, list):
        return "expected lists as tags and triggers"
    for tag in tags:
        begin = tag.get("begin") if isinstance(tag, dict) else None
        if sum(str(begin).startswith(str(trigger)) for trigger in triggers) != 1:
            return f"expected one trigger that begins {str(begin)[:80]!r}"
    return ""
