"""Mails as files: who wrote what to whom; attachments are named, not read."""

from collections.abc import Iterator
from email import message_from_bytes, policy
from email.message import EmailMessage

from streams.parsing.charset import decoded
from streams.parsing.html import html_text
from streams.parsing.parsed import Parsed

_HEADERS = ("From", "To", "Cc", "Date", "Subject")
_INNER_MAX = 5  # mails within mails


def mail(data: bytes) -> Parsed:
    """The title is its subject."""
    message = message_from_bytes(data, policy=policy.default)
    return Parsed("\n\n".join(_said(message, 0)), _header(message, "Subject"))


def _said(message: EmailMessage, depth: int) -> Iterator[str]:
    heads = [(name, _header(message, name)) for name in _HEADERS]
    yield "\n".join(f"{name}: {value}" for name, value in heads if value)
    body = message.get_body(("plain", "html"))
    if isinstance(body, EmailMessage):
        yield _text(body)
    for part in message.iter_attachments() if message.is_multipart() else ():
        inner = part.get_payload()
        if isinstance(inner, list) and isinstance(first := inner[0], EmailMessage):
            if part.get_content_type() == "message/rfc822" and depth < _INNER_MAX:
                yield from _said(first, depth + 1)
        elif name := part.get_filename():
            yield f"Attachment: {name}"
        elif part.get_content_maintype() == "text":
            yield _text(part)


def _text(part: EmailMessage) -> str:
    payload = part.get_payload(decode=True)
    charset = part.get_content_charset() or ""
    text = decoded(payload if isinstance(payload, bytes) else b"", charset)
    return html_text(text) if part.get_content_subtype() == "html" else text.strip()


def _header(message: EmailMessage, name: str) -> str:
    return " ".join(str(message.get(name, "")).split())
