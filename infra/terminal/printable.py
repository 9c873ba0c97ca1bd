"""Makes untrusted text safe for a terminal: records, headers and answers may contain anything."""


def printable(text: str, keep: str = "") -> str:
    """Return the text with unprintable characters escaped, except for those in `keep`."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )
