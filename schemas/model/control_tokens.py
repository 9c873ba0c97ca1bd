"""Finds the control tokens of a model, and keeps users' texts from being tokenized to them.

Theory of operation. Control tokens are those that a tokenizer recognises wherever a text spells
their names, and that are marked as special, or that the chat template writes. A message or a
document may spell such a name, and must stay text. So `mark` puts a mark into a user's text
wherever a name might be: after a name's first character, and where the text begins with the end of
a name or ends with the beginning of one, because a template may write the rest. In the complete
prompt, `pieces` cuts at those marks that are within a name. So a tokenizer finds only the
template's names in a piece. All other marks are removed, so that other texts have their usual
tokens.

Words and single signs that a tokenizer recognises, but that are not special, count as text although
templates write them; so do spaces. Case does not matter, because templates and tokenizers may
change it. Names of a single character cannot be cut.
"""

import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate, pairwise
from os.path import commonprefix
from typing import Protocol

MARK = f"{secrets.randbits(64):020d}"  # digits, which no filter of a template changes
_END = "\0"  # of a name


class AddedToken(Protocol):
    """An added token as `tokenizers` describes it."""

    @property
    def content(self) -> str:
        """Return the name of the token."""

    @property
    def special(self) -> bool:
        """Return whether decoded answers omit it."""


class ControlTokens:
    """The control tokens of one model. May be used from any thread."""

    def __init__(
        self,
        added: Mapping[int, AddedToken],
        template: str,
        special: Mapping[str, str],
        unknown: str | None,
    ) -> None:
        """Find the control tokens; `special` has names by their use, such as `eos_token`; `unknown`
        is the name of the tokenizer's unknown token.
        """
        control = {
            token.content: token_id
            for token_id, token in added.items()
            if token.content.strip() and (token.special or _writes(template, token.content))
        }
        self.special_names = frozenset(t.content for t in added.values() if t.special)
        self.names = frozenset(control)
        steering = {name for use, name in special.items() if use != "unk_token"}
        if unknown is not None and unknown not in steering and unknown not in template:
            control.pop(unknown, None)
        self.ids = frozenset(control.values())
        self._names = Names(self.names)

    def without(self, names: Collection[str]) -> "Names":
        """Return an object that marks all names except these."""
        return Names(self.names.difference(names))

    def mark(self, text: str) -> str:
        """Return the text with marks wherever it may hold a name."""
        return self._names.mark(text)

    def pieces(self, marked: str) -> list[str]:
        """Return a marked text in pieces to encode one by one, without its marks."""
        parts = marked.split(MARK)
        if len(parts) == 1:
            return [marked] if marked else []
        text, marks = "".join(parts), [*accumulate(map(len, parts))]
        cuts, first = [0], 0
        for start, end in self._names.places(text):
            while marks[first] <= start:
                first += 1
            at = first
            while marks[at] < end:
                cuts.append(marks[at])
                at += 1
        cuts = sorted({*cuts, len(text)})
        return [text[begin:end] for begin, end in pairwise(cuts)]


class Names:
    """Finds names in texts, and parts that may become one."""

    def __init__(self, names: Iterable[str]) -> None:
        lower = sorted({name.lower() for name in names if len(name) > 1})
        self._pattern = _pattern(lower)
        self._joined = _END.join(["", *lower, ""])
        self._longest = max(map(len, lower), default=0)
        self._first, self._last = ({name[i] for name in lower} for i in (0, -1))

    def mark(self, text: str, words: Collection[str] = ()) -> str:
        """Return the text with marks, also around it if it is one of these words."""
        places = [start + 1 for start, _ in self.places(text)]
        inner = text.strip()
        if inner and (inner in words or self._is_end(inner) or self._is_begun(inner)):
            begin = text.index(inner)
            places = sorted({*places, begin, begin + len(inner)})
        if not places:
            return text
        return MARK.join(text[a:b] for a, b in pairwise([0, *places, len(text)]))

    def places(self, text: str) -> list[tuple[int, int]]:
        """Return begin and end of every name; of names with the same begin, the longest."""
        return [(name.start(), name.end(1)) for name in self._pattern.finditer(text)]

    def _is_end(self, text: str) -> bool:
        """Return whether a text begins with the end of a name, or is the middle of one; a text of
        word characters only is not."""
        head = text[: self._longest].lower()
        if len(text) < self._longest and head in self._joined and re.search(r"[^\w\0]", head):
            return True
        if self._last.isdisjoint(head):
            return False
        ends = (i + 1 for i, sign in enumerate(head) if sign in self._last)
        return any(head[:end] + _END in self._joined for end in ends)

    def _is_begun(self, text: str) -> bool:
        """Return whether a text ends with the beginning of a name."""
        tail = text[-self._longest :].lower()
        if self._first.isdisjoint(tail):
            return False
        begins = (i for i, sign in enumerate(tail) if sign in self._first)
        return any(_END + tail[begin:] in self._joined for begin in begins)


def _writes(template: str, name: str) -> bool:
    """Return whether a template writes a name that is neither a word nor a single sign."""
    return len(name) > 1 and re.search(r"[^\w\s]", name) is not None and name in template


def _pattern(names: Collection[str]) -> re.Pattern[str]:
    """Return a pattern that matches the first character of each of these names, if the whole name
    follows.

    The pattern begins with a set of characters, for which a search is fast.
    """
    rests: dict[str, set[str]] = {}
    for name in names:
        rests.setdefault(name[0], set()).add(name[1:])
    if not rests:
        return re.compile("(?!)()")
    first = "".join(re.escape(sign + sign.upper()) for sign in sorted(rests))
    whole = "|".join(f"(?<={re.escape(sign)}){_any_of(rest)}" for sign, rest in rests.items())
    return re.compile(f"[{first}](?=(?i:({whole})))")


def _any_of(texts: Collection[str]) -> str:
    """Return a pattern of these texts that matches the longest one, and tries none twice."""
    by_sign: dict[str, set[str]] = {}
    for text in filter(None, texts):
        by_sign.setdefault(text[0], set()).add(text)
    branches = []
    for _, group in sorted(by_sign.items()):
        shared = commonprefix(list(group))
        rests = {text[len(shared) :] for text in group}
        branches.append(re.escape(shared) + ("" if rests == {""} else _any_of(rests)))
    return f"(?:{'|'.join(branches)}){'?' if '' in texts else ''}"
