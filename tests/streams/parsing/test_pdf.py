"""What PDFs say."""

from streams.parsing.pdf import pdf
from tests.streams.parsing.pdfs import pdf_bytes


def test_pdf_letters_follow_unicode_map_of_font() -> None:
    letters = "3 beginbfchar <41> <FB01> <42> <FF11> <20> <0020> endbfchar"
    assert pdf(pdf_bytes("A B", letters=letters)).text == "fi 1"


def test_pdf_right_to_left_ligature_keeps_order() -> None:
    """PDFium reverses each line letter by letter, also the letters of one glyph."""
    letters = "2 beginbfchar <4C> <06440627> <4B> <0643> endbfchar"
    assert pdf(pdf_bytes("LK", letters=letters)).text == "كلا"
    assert pdf(pdf_bytes("plain")).text == "plain"
