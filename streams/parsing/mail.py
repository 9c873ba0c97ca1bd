"""Mails to text: headers and bodies; attachments are named, but not read."""

from collections.abc import Iterable, Iterator, Sequence
from email import message_from_bytes, policy
from email.message import EmailMessage
from itertools import chain

from streams.parsing.charset import decode_text
from streams.parsing.document import ParsedDocument
from streams.parsing.html import html_text

_HEADERS = ("From", "To", "Cc", "Date", "Subject")
_INNER_MAX = 5  # depth of mails within mails


def mail(data: bytes) -> ParsedDocument:
    """Return the text of a mail; its title is the subject."""
    message = message_from_bytes(data, policy=policy.default)
    return ParsedDocument(
        "\n\n".join(filter(None, _message_texts(message, 0))), _header(message, "Subject")
    )


def _message_texts(message: EmailMessage, depth: int) -> Iterator[str]:
    heads = [(name, _header(message, name)) for name in _HEADERS]
    yield "\n".join(f"{name}: {value}" for name, value in heads if value)
    yield from _parts(message, depth)


def _parts(part: EmailMessage, depth: int) -> Iterator[str]:
    """Yield the texts of a part: one of alternatives, the first of related parts, otherwise all."""
    kind, inner = part.get_content_type(), part.get_payload()
    if isinstance(inner, list):
        within = [child for child in inner if isinstance(child, EmailMessage)]
        if kind == "message/rfc822":
            if depth < _INNER_MAX:
                yield from _message_texts(within[0], depth + 1) if within else ()
        elif kind == "multipart/alternative":
            yield from _alternative(within, depth)
        elif part.get_content_maintype() == "multipart":
            main_parts = within[:1] if kind == "multipart/related" else within
            for child in main_parts:
                yield from _parts(child, depth)
            yield from _attachments(within[len(main_parts) :])
    elif part.get_content_maintype() == "text" and not (
        part.is_attachment() and part.get_filename()
    ):
        yield _text(part)
    elif name := part.get_filename():
        yield f"Attachment: {name}"


def _alternative(parts: Sequence[EmailMessage], depth: int) -> Iterator[str]:
    """Yield the plainest alternative with a text, and the names of attachments of the others."""
    for part in sorted(parts, key=_plainness):
        if texts := [text for text in _parts(part, depth) if text]:
            yield from texts
            yield from _attachments([sibling for sibling in parts if sibling is not part])
            return


def _plainness(part: EmailMessage) -> int:
    kind = part.get_content_type()
    if kind == "text/plain":
        return 0
    return 1 if kind == "text/html" or part.is_multipart() else 2


def _attachments(parts: Iterable[EmailMessage]) -> Iterator[str]:
    for part in chain.from_iterable(outer.walk() for outer in parts):
        if part.is_attachment() and (name := part.get_filename()):
            yield f"Attachment: {name}"


def _text(part: EmailMessage) -> str:
    payload = part.get_payload(decode=True)
    charset = part.get_content_charset() or ""
    text = decode_text(payload if isinstance(payload, bytes) else b"", charset)
    return html_text(text) if part.get_content_subtype() == "html" else text.strip()


def _header(message: EmailMessage, name: str) -> str:
    return " ".join(str(message.get(name, "")).split())
