"""What a terminal is given of records and answers."""

from dataclasses import replace
from types import SimpleNamespace

from infra.cli.log.tail import _line
from infra.terminal.printable import printable
from schemas.codec import Codec
from tests.schemas.examples import example

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\r\n"


def test_tail_escapes_control_characters_of_records() -> None:
    """`trivium tail` once printed escape sequences of ids, keys and headers unchanged."""
    record = replace(example("trivium.Cancellation"), request_id=EVIL)
    value = Codec().encode(record)
    for record_value in (value, b"garbage"):
        line = SimpleNamespace(
            partition=0,
            offset=1,
            timestamp=2,
            key=EVIL.encode(),
            value=record_value,
            headers=[("x", EVIL.encode())],
        )
        text = _line(Codec(), line, False)
        assert text.isprintable() and "owned" in text
        assert _line(Codec(), line, True).isprintable()


def test_printable_escapes_all_but_allowed_characters() -> None:
    assert printable("plain é") == "plain é"
    assert printable("a\n\tb\x1b", "\n\t") == "a\n\tb\\x1b"
    assert printable(EVIL).isprintable()
