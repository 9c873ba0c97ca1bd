"""HTML pages of reports: one style, tables of rows or of items, embedded pictures."""

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, TypeVar

Item = TypeVar("Item")

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:.8rem 0;font-variant-numeric:tabular-nums}
th,td{padding:.2rem .7rem;border-bottom:1px solid #dde3ea;text-align:right}
th:first-child,td:first-child{text-align:left}
img{max-width:100%}.yes{color:#1a7f37}.no{color:#b42318}.why{color:#55606e;font-size:90%}
"""


def page(title: str, parts: Iterable[str]) -> str:
    """Return a whole HTML document with a title."""
    head = f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title>"
    return "\n".join((f"{head}<style>{_STYLE}</style><h1>{escape(title)}</h1>", *parts))


def picture(name: str, data: bytes) -> str:
    """Return an image tag that embeds a PNG file."""
    encoded = base64.b64encode(data).decode()
    return f'<img alt="{escape(name)}" src="data:image/png;base64,{encoded}">'


def note(text: str) -> str:
    """Return a paragraph in small type."""
    return f"<p class=why>{escape(text)}</p>"


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return an HTML table; booleans are shown as yes and no."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def listing(items: Iterable[Item], columns: Mapping[str, Callable[[Item], Any]]) -> str:
    """Return a table with a row for each item; `columns` maps heads to functions of an item."""
    return table(list(columns), ([show(item) for show in columns.values()] for item in items))


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return f"<td class={'yes' if value else 'no'}>{'yes' if value else 'no'}</td>"
    return f"<td>{escape(str(value))}</td>"
