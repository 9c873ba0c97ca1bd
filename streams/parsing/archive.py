"""Opens files that are archives of others, within limits."""

import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager

from streams.parsing.document import Unreadable

UNPACKED_BYTES_MAX = 512 << 20
MEMBERS_MAX = 20_000


@contextmanager
def open_archive(data: bytes, kind: str) -> Iterator[zipfile.ZipFile]:
    """Open an archive; raises Unreadable if it is invalid, encrypted, or too large unpacked."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            size = sum(member.file_size for member in members)
            if len(members) > MEMBERS_MAX or size > UNPACKED_BYTES_MAX:
                raise Unreadable(
                    f"expected {kind} of at most {MEMBERS_MAX} parts and {UNPACKED_BYTES_MAX} "
                    f"bytes unpacked, found {len(members)} and {size}"
                )
            if any(member.flag_bits & 1 for member in members):
                raise Unreadable(f"expected {kind} without a password, found an encrypted one")
            yield archive
    except (zipfile.BadZipFile, NotImplementedError, EOFError, OSError) as error:
        raise Unreadable(f"expected {kind}: {error}") from error
