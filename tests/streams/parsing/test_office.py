"""Word documents, slides, books and mails, made here."""

import io
import zipfile
from email.message import EmailMessage

import pytest
from pptx import Presentation
from pptx.util import Inches

from streams.parsing import archive
from streams.parsing.document import ParsedDocument, Unreadable
from streams.parsing.kinds import parse

W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
PACKAGE = "http://schemas.openxmlformats.org/package/2006"


def zipped(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        for name, text in files.items():
            packed.writestr(name, text)
    return buffer.getvalue()


def word(body: str) -> bytes:
    document = "wordprocessingml.document.main+xml"
    return zipped(
        {
            "[Content_Types].xml": f'<Types xmlns="{PACKAGE}/content-types">'
            '<Default Extension="rels" ContentType="application/xml"/><Override '
            f'PartName="/word/document.xml" ContentType="application/vnd.openxml.{document}"/>'
            "</Types>",
            "_rels/.rels": f'<Relationships xmlns="{PACKAGE}/relationships"><Relationship Id="1" '
            f'Type="{OFFICE}/officeDocument" Target="word/document.xml"/></Relationships>',
            "word/document.xml": f"<w:document {W}><w:body>{body}</w:body></w:document>",
        }
    )


def paragraph(text: str, style: str = "") -> str:
    style_xml = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f"<w:p>{style_xml}<w:r><w:t>{text}</w:t></w:r></w:p>"


def only(kind: str, data: bytes) -> ParsedDocument:
    (document,) = parse(kind, data)
    return document


def test_docx_keeps_headings_and_tables() -> None:
    cells = "".join(f"<w:tc>{paragraph(text)}</w:tc>" for text in ("a", "", "ü"))
    body = paragraph("Ferries", "Heading1") + paragraph("From pier 7.")
    document = only(".docx", word(f"{body}<w:tbl><w:tr>{cells}</w:tr></w:tbl>"))
    assert (document.title, document.text) == ("Ferries", "# Ferries\n\nFrom pier 7.\n\na | | ü")


def test_docx_equation_becomes_typed_text() -> None:
    m = 'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'
    run = "<m:r><m:t>{}</m:t></m:r>".format
    power = f"<m:sSup><m:e>{run('x')}</m:e><m:sup>{run('2')}</m:sup></m:sSup>"
    half = f"<m:f><m:num>{run('a+b')}</m:num><m:den>{run('2')}</m:den></m:f>"
    body = f"<w:p><w:r><w:t>So </w:t></w:r><m:oMath {m}>{power}{run('=')}{half}</m:oMath></w:p>"
    alone = f"<w:p><m:oMathPara {m}><m:oMath>{run('y')}</m:oMath></m:oMathPara></w:p>"
    assert only(".docx", word(body + alone)).text == "So x^2=(a+b)/2\n\ny"
    sound = (
        "<w:rt><w:r><w:t>とう</w:t></w:r></w:rt><w:rubyBase><w:r><w:t>東</w:t></w:r></w:rubyBase>"
    )
    assert only(".docx", word(f"<w:p><w:r><w:ruby>{sound}</w:ruby></w:r></w:p>")).text == "東"


def test_docx_field_text_is_read() -> None:
    field = f'<w:fldSimple w:instr="SEQ">{paragraph("1")[5:-6]}</w:fldSimple>'
    assert only(".docx", word(f"<w:p><w:r><w:t>Table </w:t></w:r>{field}</w:p>")).text == "Table 1"


def test_pptx_keeps_titles_tables_and_notes() -> None:
    show = Presentation()
    slide = show.slides.add_slide(show.slide_layouts[1])
    slide.shapes.title.text = "Ferries"
    slide.placeholders[1].text = "From pier 7."
    inch = Inches(1)
    table = slide.shapes.add_table(1, 2, inch, inch, inch, inch).table
    table.cell(0, 0).text, table.cell(0, 1).text = "a", "b\nc"
    slide.notes_slide.notes_text_frame.text = "Say it."
    show.core_properties.title = "The port"
    buffer = io.BytesIO()
    show.save(buffer)
    document = only(".pptx", buffer.getvalue())
    assert (document.title, document.text) == (
        "The port", "# Ferries\n\nFrom pier 7.\n\na | b c\n\nSay it."
    )  # fmt: skip


def test_epub_reads_pages_in_spine_order() -> None:
    page = '<html xmlns="http://www.w3.org/1999/xhtml"><head><title/></head><body>{}</body></html>'
    book = zipped(
        {
            "META-INF/container.xml": '<container><rootfile full-path="OPS/book.opf"/></container>',
            "OPS/book.opf": '<package xmlns:dc="http://purl.org/dc/elements/1.1/"><metadata>'
            "<dc:title>Boats</dc:title></metadata><manifest>"
            '<item id="one" href="a%20b.xhtml" media-type="application/xhtml+xml"/>'
            '<item id="two" href="two.xhtml" media-type="application/xhtml+xml"/>'
            '<item id="away" href="../../etc/passwd" media-type="text/html"/></manifest>'
            '<spine><itemref idref="two"/><itemref idref="one"/><itemref idref="away"/></spine>'
            "</package>",
            "OPS/a b.xhtml": page.format("<h2>Two</h2>"),
            "OPS/two.xhtml": page.format("<p>One<script/>.</p>"),
        }
    )
    document = only(".epub", book)
    assert (document.title, document.text) == ("Boats", "One.\n\n## Two")


def test_mail_contains_headers_text_and_attachments() -> None:
    mail, inner = EmailMessage(), EmailMessage()
    mail["From"], mail["To"], mail["Subject"] = "Änne <a@x.org>", "b@x.org", "Fähre"
    mail.set_content("Gruß\n", charset="iso-8859-1")
    mail.add_alternative("<p>Gruß</p>", subtype="html")
    mail.add_attachment(b"%PDF", maintype="application", subtype="pdf", filename="plan.pdf")
    inner["Subject"] = "Old"
    inner.set_content("<p>Was<br>said</p>", subtype="html")
    mail.add_attachment(inner)
    document = only(".eml", mail.as_bytes())
    assert (document.title, document.text) == (
        "Fähre",
        "From: Änne <a@x.org>\nTo: b@x.org\nSubject: Fähre\n\nGruß\n\nAttachment: plan.pdf\n\n"
        "Subject: Old\n\nWas\nsaid",
    )


def test_mail_contains_inline_texts_and_one_alternative() -> None:
    """A mailing list's footer does not replace the body."""
    mail, both = EmailMessage(), EmailMessage()
    mail["Subject"] = "S"
    mail.make_mixed()
    for text, subtype in (("<p>The body</p>", "html"), ("footer", "plain")):
        part = EmailMessage()
        part.set_content(text, subtype=subtype)
        mail.attach(part)
    both.set_content(" \n")
    both.add_alternative("<p>Only in <b>HTML</b></p>", subtype="html")
    both.add_attachment(b"x", maintype="image", subtype="png", filename="x.png")
    mail.attach(both)
    assert only(".eml", mail.as_bytes()).text == (
        "Subject: S\n\nThe body\n\nfooter\n\nOnly in HTML\n\nAttachment: x.png"
    )


@pytest.mark.parametrize("kind", [".docx", ".pptx", ".epub"])
def test_parser_rejects_damaged_and_oversized_archive(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for data, message in (
        (b"no", "File is not a zip file"),
        (zipped({}), "expected"),
        (zipped({"META-INF/container.xml": "<"}), "expected"),
    ):
        with pytest.raises(Unreadable, match=message):
            parse(kind, data)
    monkeypatch.setattr(archive, "UNPACKED_BYTES_MAX", 10)
    with pytest.raises(Unreadable, match="and 10 bytes unpacked, found 1 and 99"):
        parse(kind, zipped({"a": "x" * 99}))


def test_parse_error_names_older_office_format() -> None:
    with pytest.raises(Unreadable, match="an older form, or a file with a password"):
        parse(".docx", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1")
