"""Code blocks of the pages, and the command lines in them.

A block of `sh` holds one command per line. `<!-- runs -->` before a block says that
`tests/e2e/test_pages.py` runs it on a stack.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from tests import tidy_pages

TRIVIUM = ".venv/bin/trivium"
_BLOCK = re.compile(r"^(?:<!-- (runs) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(?:\.venv/bin/)?(trivium [^`\n]+)`")
_JOINED = {"&&", "|", ";"}


@dataclass(frozen=True)
class Block:
    """One code block."""

    page: str
    runs: str  # empty where it is only parsed
    language: str
    text: str

    def commands(self) -> Iterator[list[str]]:
        """Each command of each line, as words; comments are left out."""
        for line in self.text.splitlines():
            words: list[str] = []
            for word in shlex.split(line, comments=True):
                if word in _JOINED:
                    yield words
                    words = []
                else:
                    words.append(word)
            if words:
                yield words


def blocks(*languages: str) -> list[Block]:
    """Those of all pages that tell what is."""
    return [
        Block(page, runs, language, text)
        for page, whole in sorted(tidy_pages.of_today().items())
        for runs, language, text in _BLOCK.findall(whole)
        if language in languages
    ]


def inline_commands() -> set[tuple[str, str]]:
    """Page and text of every `trivium ...` within a sentence."""
    return {
        (page, text)
        for page, whole in tidy_pages.of_today().items()
        for text in _INLINE.findall(whole)
    }
