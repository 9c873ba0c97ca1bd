"""PDFs made for tests."""

import io

from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject


def pdf_bytes(*pages: str, password: str = "", letters: str = "") -> bytes:
    """A PDF with a line of text on each page; `letters` says which Unicode letters its codes are,
    as in `<41> <06440627>`.
    """
    writer = PdfWriter()
    for text in pages:
        page = writer.add_blank_page(200, 200)
        font = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
        font_object = DictionaryObject({NameObject(k): NameObject(v) for k, v in font.items()})
        if letters:
            cmap = f"begincmap 1 begincodespacerange <00> <ff> endcodespacerange {letters} endcmap"
            table = DecodedStreamObject()
            table.set_data(cmap.encode())
            font_object[NameObject("/ToUnicode")] = writer._add_object(table)
        fonts = DictionaryObject({NameObject("/F1"): font_object})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        stream = DecodedStreamObject()
        stream.set_data(f"BT /F1 12 Tf 10 100 Td ({text}) Tj ET".encode())
        page[NameObject("/Contents")] = writer._add_object(stream)
    writer.add_metadata({"/Title": "A paper"})
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    buffer = io.BytesIO()
    writer.write(buffer)
    return buffer.getvalue()
