"""Text from elsewhere on a terminal: records, headers and answers are whatever somebody wrote."""


def printable(text: str, keep: str = "") -> str:
    """The text with what a terminal would obey, or hide, spelled out; `keep` stays as it is."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )
