"""EPUB books to text: the pages that the book lists, in its order."""

import posixpath
from typing import Any
from urllib.parse import unquote
from zipfile import ZipFile

from lxml import etree  # type: ignore[import-untyped]  # ships no types

from streams.parsing.archive import open_archive
from streams.parsing.document import ParsedDocument, Unreadable
from streams.parsing.html import html

_PAGES = ("application/xhtml+xml", "text/html", "application/x-dtbook+xml")
_CONTAINER = "META-INF/container.xml"


def epub(data: bytes) -> ParsedDocument:
    """Return the text of a book; raises Unreadable for an invalid or an encrypted one."""
    with open_archive(data, "a book in EPUB") as archive:
        names = set(archive.namelist())
        place = _xml(archive, _CONTAINER).xpath("string(//*[local-name()='rootfile']/@full-path)")
        book = _xml(archive, str(place))
        title = str(book.xpath("string(//*[local-name()='metadata']/*[local-name()='title'])"))
        items = {item.get("id"): item for item in book.xpath("//*[local-name()='item']")}
        refs = [itemref.get("idref") for itemref in book.xpath("//*[local-name()='itemref']")]
        folder = posixpath.dirname(str(place))
        texts = []
        for item in (items[ref] for ref in dict.fromkeys(refs) if ref in items):
            path = posixpath.normpath(posixpath.join(folder, unquote(item.get("href") or "")))
            if item.get("media-type") in _PAGES and path in names:
                texts.append(html(archive.read(path)).text)
    text = "\n\n".join(text for text in texts if text)
    if not text and "META-INF/encryption.xml" in names:
        raise Unreadable("expected a book without a lock, found an encrypted one")
    return ParsedDocument(text, " ".join(title.split()))


def _xml(archive: ZipFile, name: str) -> Any:
    parser = etree.XMLParser(no_network=True, resolve_entities="internal", recover=True)
    try:
        root = etree.fromstring(archive.read(name), parser)
    except (KeyError, etree.XMLSyntaxError) as error:
        raise Unreadable(f"expected a book in EPUB: {error}") from error
    if root is None:
        raise Unreadable(f"expected a book in EPUB, found no XML in {name}")
    return root
