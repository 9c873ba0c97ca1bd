"""Decodes bytes to text: by a byte order mark, by a declaration, as UTF-8, or by detection."""

import codecs
import contextlib
import re

import chardet

from streams.parsing.document import Unreadable

_MARKS = {  # UTF-32 first: one of its marks begins with one of UTF-16
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# Browsers and mailers read the larger set, since writers often name the smaller one and use it.
_LARGER = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "tis-620": "cp874",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "gb2312": "gb18030",
    "gbk": "gb18030",
}
_ALIASES = {"x-sjis": "cp932", "windows-31j": "cp932", "x-gbk": "gbk", "x-mac-roman": "mac-roman"}
# Other codecs of Python are no character sets; one of them takes quadratic time.
_SETS = re.compile(r"utf-(8|16|32)|ascii|cp|iso|koi8|mac|shift|euc|gb|big5|hz|tis|kz1048|johab")
_USUAL = "cp1252"  # if nothing else fits
_DETECTED_BYTES_MAX = 256 << 10  # bytes that the detector reads
_TELLING = 4  # least number of bytes beyond ASCII for detection
_JAPANESE = re.compile(rb"\x1b\$[@B]")  # ISO-2022-JP has seven bits, so UTF-8 accepts it
_DAMAGED_SHARE_MAX = 0.1  # of damaged characters among those beyond ASCII
_SIGNS = re.compile(r"[\x01-\x08\x0e-\x1a\x1c-\x1f]")  # of machines, terminals
_SIGNS_SHARE_MAX = 0.01


def decode_text(data: bytes, declared: str = "") -> str:
    r"""Decode bytes to text with `\n` at line ends; raises Unreadable if it is no text."""
    text = _text(data, _codec_name(declared)).removeprefix("\ufeff")
    if "\0" in text:
        raise Unreadable("expected text, found zero bytes: it is some other kind of file")
    text, count = _SIGNS.subn("", text)
    if count > _SIGNS_SHARE_MAX * len(text):
        raise Unreadable(
            f"expected text, found {count} control characters: it is some other kind of file"
        )
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _text(data: bytes, declared: str) -> str:
    for mark, name in _MARKS.items():
        if data.startswith(mark):
            return _decode_strict(data, name)
    if wide := _wide(data):
        return _decode_strict(data, wide)
    if not declared and _JAPANESE.search(data):
        declared = "iso2022_jp"
    for name in (declared, "utf-8"):
        if name:
            with contextlib.suppress(UnicodeDecodeError):
                return data.decode(name)
    if not declared or declared == "utf-8":
        text = data.decode(errors="replace")
        non_ascii = len(text) - len(text.encode("ascii", "ignore"))
        if text.count("\ufffd") <= _DAMAGED_SHARE_MAX * non_ascii:
            return text
        declared = _detect(data)
    return data.decode(declared, errors="replace")


def _decode_strict(data: bytes, name: str) -> str:
    try:
        return data.decode(name)
    except UnicodeDecodeError as error:
        raise Unreadable(
            f"expected text in {name.upper()}, found other bytes at {error.start}"
        ) from None


def _codec_name(declared: str) -> str:
    """Return Python's name of a character set in single bytes; empty for any other name."""
    declared = declared.strip().lower()
    try:
        name = codecs.lookup(_ALIASES.get(declared, declared)).name
    except (LookupError, ValueError):
        return ""
    if not _SETS.match(name):
        return ""
    # The declaration was read as single bytes, so the text is not UTF-16 or UTF-32.
    return "utf-8" if name.startswith(("utf-16", "utf-32")) else _LARGER.get(name, name)


def _wide(data: bytes) -> str:
    """Return UTF-16 or UTF-32 without a mark, by the positions of zero bytes; empty for other
    encodings."""
    head = data[:4_096]
    zeros = [head[at::4].count(0) for at in range(4)]
    fours = len(head) // 4
    if not sum(zeros) or len(data) % 2:
        return ""
    if fours and not len(data) % 4 and min(zeros[2:]) >= fours and not zeros[0]:
        return "utf-32-le"
    if fours and not len(data) % 4 and min(zeros[:2]) >= fours and not zeros[3]:
        return "utf-32-be"
    if not zeros[0] + zeros[2]:
        return "utf-16-le"
    return "" if zeros[1] + zeros[3] else "utf-16-be"


def _detect(data: bytes) -> str:
    """Detect the encoding. A few letters among many of ASCII do not show the language."""
    sample = data[:_DETECTED_BYTES_MAX]
    high = len(sample) - len(sample.decode("ascii", "ignore"))
    if high < _TELLING and 2 * high < len(sample):
        return _USUAL
    name = _codec_name(chardet.detect(sample)["encoding"] or "") or _USUAL
    try:
        data.decode(name)
    except UnicodeDecodeError:
        return _USUAL
    return name
