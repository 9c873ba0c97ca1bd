"""Character sets that files declare, or do not."""

import pytest

from streams.parsing.charset import decode_text
from streams.parsing.document import Unreadable
from streams.parsing.html import html
from streams.parsing.kinds import parse

GERMAN = "Die Fähre nach Grömitz fährt täglich um sieben Uhr früh an der großen Straße vorbei."
TEXTS = {
    "cp1252": "L'été dernier, nous avons mangé des crêpes à la plage. C’était très agréable.",
    "cp1250": "Zażółć gęślą jaźń. Wczoraj poszliśmy do sklepu, żeby kupić świeże pieczywo i mleko.",
    "cp1251": "Паром отправляется от седьмого причала каждое утро, и мы смотрели новую пьесу.",
    "koi8-r": "Паром отправляется от седьмого причала каждое утро, и мы смотрели новую пьесу.",
    "cp1253": "Το πλοίο αναχωρεί κάθε πρωί από την προβλήτα επτά. Χθες πήγαμε στο θέατρο.",
    "cp1255": "המעבורת יוצאת בכל בוקר מרציף שבע. אתמול הלכנו לתיאטרון וראינו הצגה חדשה.",
    "cp1256": "تغادر العبارة كل صباح من الرصيف السابع. ذهبنا أمس إلى المسرح وشاهدنا مسرحية.",
    "shift_jis": "渡し船は毎朝七番埠頭から出発します。昨日、私たちは劇場に行きました。",
    "iso2022_jp": "渡し船は毎朝七番埠頭から出発します。",
    "euc_jp": "渡し船は毎朝七番埠頭から出発します。昨日、私たちは劇場に行きました。",
    "gb18030": "渡轮每天早上从七号码头出发。昨天我们去剧院看了一场新戏。",
    "big5": "渡輪每天早上從七號碼頭出發。昨天我們去劇院看了一場新戲。",
    "euc_kr": "페리는 매일 아침 부두에서 출발합니다. 어제 우리는 극장에 갔습니다.",
}


@pytest.mark.parametrize("charset", TEXTS)
def test_charset_is_detected_in_text_without_declaration(charset: str) -> None:
    assert decode_text(TEXTS[charset].encode(charset)) == TEXTS[charset]


@pytest.mark.parametrize(
    "charset", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"]
)
def test_charset_detects_unicode_with_and_without_mark(charset: str) -> None:
    for text in (GERMAN, TEXTS["cp1251"], "ok"):
        assert decode_text(text.encode(charset)) == text


def test_html_parser_follows_declared_charset() -> None:
    page = '<meta charset="{}"><p>Grüße aus Łódź'
    for declared, charset in (("iso-8859-2", "iso-8859-2"), ("Windows-1250", "cp1250")):
        assert html(page.format(declared).encode(charset)).text == "Grüße aus Łódź"
    old = b'<meta http-equiv=x content="text/html; charset=ISO-8859-1"><p>5 \x80, Gr\xfc'
    assert html(old).text == "5 €, Grü", "browsers take the larger set for it"
    assert html(b'<meta charset="utf-16"><p>' + "Grüße".encode()).text == "Grüße"
    assert html(b'<meta charset="no-such"><p>Gr\xfc\xdfe').text == "Grüße"
    assert html('<?xml version="1.0" encoding="koi8-r"?><p>Да</p>'.encode("koi8-r")).text == "Да"


def test_code_parser_follows_charset_of_first_lines() -> None:
    (document,) = parse(
        ".py", b"#!/bin/python\n# -*- coding: koi8-r -*-\n# " + "Да".encode("koi8-r")
    )
    assert "Да" in document.text


def test_charset_replaces_only_damaged_byte() -> None:
    assert decode_text((GERMAN * 3).encode() + b"\xff!") == GERMAN * 3 + "\ufffd!"


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\n\0\0\0", b"a\0b", bytes(range(1, 9)) * 9])
def test_charset_rejects_binary_data(data: bytes) -> None:
    with pytest.raises(Unreadable, match="it is some other kind of file"):
        decode_text(data)


@pytest.mark.parametrize("charset", ["idna", "hex", "unicode_escape", "undefined", "utf-7"])
def test_charset_ignores_codecs_that_are_no_charset(charset: str) -> None:
    assert decode_text(b"a-\\n-b", charset) == "a-\\n-b"
