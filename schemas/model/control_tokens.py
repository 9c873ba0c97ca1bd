"""Which tokens steer the model, and how texts from outside are kept from having them.

Theory of operation. Control tokens are those that a tokenizer takes whole wherever a text spells
their names, and that are marked as special, or that the chat template writes. Whoever writes a
message or a document may spell such a name, and it is text. So `mark` puts a mark into a text from
outside wherever a name might hold it: behind a name's first character, and where the text begins
with the end of a name or ends with the beginning of one, since a template may write the rest. Once
all stands together, `pieces` cuts at those marks that lie within a name. A tokenizer finds no name
in a piece but those of the template. All other marks go without a trace, so that other texts have
the tokens that they have anywhere else.

Words and single signs that a tokenizer takes whole, but that are not special, are text though
templates write them; so are spaces. Letters count in either case, since templates and tokenizers
may change it. Names of a single character cannot be cut.
"""

import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate, pairwise
from os.path import commonprefix
from typing import Protocol

MARK = f"{secrets.randbits(64):020d}"  # digits, which every filter of a template leaves alone
_END = "\0"  # of a name


class AddedToken(Protocol):
    """As `tokenizers` tells of it."""

    @property
    def content(self) -> str:
        """Return the name of the token."""

    @property
    def special(self) -> bool:
        """Whether answers leave it out."""


class ControlTokens:
    """Those of one model. May be used from any thread."""

    def __init__(
        self,
        added: Mapping[int, AddedToken],
        template: str,
        special: Mapping[str, str],
        unknown: str | None,
    ) -> None:
        """`special` are names by their use, as `eos_token`; `unknown` is the name that the
        tokenizer writes for what it does not know.
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
        """What marks all names but these."""
        return Names(self.names.difference(names))

    def mark(self, text: str) -> str:
        """Return the text with marks wherever it may hold a name."""
        return self._names.mark(text)

    def pieces(self, marked: str) -> list[str]:
        """A text in pieces that are to be encoded one by one, without its marks."""
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
    """Finds names, and what may become one."""

    def __init__(self, names: Iterable[str]) -> None:
        lower = sorted({name.lower() for name in names if len(name) > 1})
        self._pattern = _pattern(lower)
        self._joined = _END.join(["", *lower, ""])
        self._longest = max(map(len, lower), default=0)
        self._first, self._last = ({name[i] for name in lower} for i in (0, -1))

    def mark(self, text: str, words: Collection[str] = ()) -> str:
        """With marks, also around these words where the text is one of them."""
        places = [start + 1 for start, _ in self.places(text)]
        inner = text.strip()
        if inner and (inner in words or self._is_end(inner) or self._is_begun(inner)):
            begin = text.index(inner)
            places = sorted({*places, begin, begin + len(inner)})
        if not places:
            return text
        return MARK.join(text[a:b] for a, b in pairwise([0, *places, len(text)]))

    def places(self, text: str) -> list[tuple[int, int]]:
        """Begin and end of every name, of those that begin together the longest."""
        return [(name.start(), name.end(1)) for name in self._pattern.finditer(text)]

    def _is_end(self, text: str) -> bool:
        """Whether it begins with the end of a name, or is from the middle of one; words alone are
        words."""
        head = text[: self._longest].lower()
        if len(text) < self._longest and head in self._joined and re.search(r"[^\w\0]", head):
            return True
        if self._last.isdisjoint(head):
            return False
        ends = (i + 1 for i, sign in enumerate(head) if sign in self._last)
        return any(head[:end] + _END in self._joined for end in ends)

    def _is_begun(self, text: str) -> bool:
        """Whether it ends with the beginning of a name."""
        tail = text[-self._longest :].lower()
        if self._first.isdisjoint(tail):
            return False
        begins = (i for i, sign in enumerate(tail) if sign in self._first)
        return any(_END + tail[begin:] in self._joined for begin in begins)


def _writes(template: str, name: str) -> bool:
    """Whether a template writes a name that is neither a word nor a single sign, as texts have."""
    return len(name) > 1 and re.search(r"[^\w\s]", name) is not None and name in template


def _pattern(names: Collection[str]) -> re.Pattern[str]:
    """The first characters of these names, wherever a text has the whole name, which is looked at
    from there.

    It begins with these characters, for which a text is searched in no time.
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
    """A pattern of these texts that takes the longest, and tries none twice."""
    by_sign: dict[str, set[str]] = {}
    for text in filter(None, texts):
        by_sign.setdefault(text[0], set()).add(text)
    branches = []
    for _, group in sorted(by_sign.items()):
        shared = commonprefix(list(group))
        rests = {text[len(shared) :] for text in group}
        branches.append(re.escape(shared) + ("" if rests == {""} else _any_of(rests)))
    return f"(?:{'|'.join(branches)}){'?' if '' in texts else ''}"
