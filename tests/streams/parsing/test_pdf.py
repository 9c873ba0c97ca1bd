"""What PDFs say."""

from streams.parsing.pdf import pdf
from tests.streams.parsing.pdfs import pdf_bytes


def test_letters_of_fonts_are_those_that_they_stand_for() -> None:
    letters = "3 beginbfchar <41> <FB01> <42> <FF11> <20> <0020> endbfchar"
    assert pdf(pdf_bytes("A B", letters=letters)).text == "fi 1"


def test_a_ligature_from_the_right_keeps_its_order() -> None:
    """PDFium turns each line letter by letter, and so the two letters of one glyph."""
    letters = "2 beginbfchar <4C> <06440627> <4B> <0643> endbfchar"
    assert pdf(pdf_bytes("LK", letters=letters)).text == "كلا"
    assert pdf(pdf_bytes("plain")).text == "plain"
