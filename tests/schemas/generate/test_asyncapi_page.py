"""The AsyncAPI document as a page: whole, escaped, and from nowhere else."""

import re
from html import unescape

from schemas.generate.asyncapi import asyncapi_document
from schemas.generate.asyncapi_page import asyncapi_page
from schemas.topics import TOPICS

DOCUMENT = asyncapi_document()
PAGE = asyncapi_page(DOCUMENT)


def test_page_lists_every_topic_and_field() -> None:
    text = unescape(PAGE)
    for topic in TOPICS.values():
        assert f'id="topic-{topic.name}"' in PAGE and topic.doc in text
    for name, message in DOCUMENT["components"]["messages"].items():
        for field in message["payload"].get("schema", {}).get("fields", ()):
            assert f"<td>{field['name']}</td>" in PAGE and field["doc"] in text, (name, field)


def test_page_links_resolve_within_page() -> None:
    links = re.findall(r'href="([^"]*)"', PAGE)
    inside = {link for link in links if link.startswith("#")}
    assert len(inside) > len(TOPICS) and set(links) - inside == {"data:,"}
    assert {link[1:] for link in inside} <= set(re.findall(r'id="([^"]*)"', PAGE))


def test_page_loads_no_external_resources() -> None:
    assert not re.search(r"<script|src=|@import|url\(|https?:", PAGE)


def test_page_escapes_descriptions() -> None:
    hostile = asyncapi_document()
    hostile["channels"]["requests"]["description"] = "<script>alert(1)</script>"
    assert "<script" not in asyncapi_page(hostile)
