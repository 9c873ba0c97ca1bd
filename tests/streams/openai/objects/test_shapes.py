"""What callers keep, as pages."""

import json

from streams.openai.objects.shapes import PIECE_CHARS, content_page


def test_file_content_page_comes_in_bounded_pieces() -> None:
    """Together the pieces are one page, wherever they are divided."""
    long = '"ä\\\n😀' * PIECE_CHARS
    pieces = list(content_page([long, "", "short"]))
    assert max(map(len, pieces)) <= PIECE_CHARS * 4 < len(long)
    page = json.loads(b"".join(pieces))
    assert [item["text"] for item in page["data"]] == [long, "", "short"]
    assert page["object"] == "vector_store.file_content.page" and page["has_more"] is False
    assert json.loads(b"".join(content_page([])))["data"] == []
