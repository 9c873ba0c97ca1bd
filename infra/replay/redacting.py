"""Leaves what was said out of a recording, so that a replay of it decides the same all the same.

Theory of operation. What the router core reads of a prompt is its length, and which other prompts
begin alike: by block hashes, which workers tell of their caches too, and by digests of what a
session said before. So prompts get stand-ins (`standins.py`) that begin alike where prompts did,
and block hashes those of the stand-ins (`prompts.py`); a hash of which the recording has no prompt
gets any other.

Two routers then go through the recording side by side: one as it was, one with stand-ins. What
follows at the first one must be what was recorded, and at the second one the same but for words;
its checksums are written. So a recording that is made replays equal, and decides what was decided.
Where that cannot be, none is made. Called by `collecting.py`.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import gcd
from typing import Any

from infra.replay.applying import applied, content_of, event_of
from infra.replay.prompts import Prompts
from infra.replay.recording import LINE, RECORD, SNAPSHOT, Row
from infra.replay.standins import StandIns
from infra.replay.states import restated, seen_in
from infra.replay.words import Words, names_in
from schemas.codec import Codec
from schemas.errors import RecordError
from schemas.prefix import pack, unpack
from schemas.records import Continued, JournalSnapshot, KvEvents, Request, Retrieved
from streams.core.effects import Effect
from streams.core.placement.case import RequestCase
from streams.core.placement.prefixes import PrefixIndex
from streams.core.requests.context import SessionHistories, SessionHistory
from streams.core.requests.live import LiveRequest
from streams.core.router import Router
from streams.journal.inputs import STOPPED, TELLS_ID
from streams.journal.journal import effects_sum, in_parts
from streams.journal.snapshot import pack_router, unpack_router

_SALT_BYTES = 32
_WORDLESS = (*TELLS_ID, "fleet")
_BLANK = Words(
    tokens=lambda tokens: bytes(len(tokens)),
    text=lambda text: "",  # messages name requests
    digest=lambda digest: "",
    name=str,
)


def redacted(rows: Iterable[Row], *, names: bool = False) -> Iterator[Row]:
    """The rows without prompts, answers and texts, and with other names if these are to go, too.

    Raises RecordError where they are not decided again as they were.
    """
    return _Redacting(list(rows), names=names).rows()


class _Redacting:
    """One recording."""

    def __init__(self, rows: list[Row], *, names: bool) -> None:
        self._rows, self._codec = rows, Codec()
        self._states = _states(rows, self._codec)
        states = [each for router in self._states.values() for each in seen_in(router)]
        told = self._told()
        seen = [*states, *told]
        sizes = [s for each in seen if isinstance(each, PrefixIndex) for s in each.block_sizes]
        sizes += [each.block_size for each in seen if isinstance(each, KvEvents)]
        splices = any(isinstance(each, Request) and each.retrieval for each in seen)
        stand_ins = StandIns(os.urandom(_SALT_BYTES), 1 if splices else gcd(*sizes) or 1)
        self._name = stand_ins.name if names else str
        self._prompts = Prompts(stand_ins, self._name, sizes)
        self._words = self._prompts.words
        self._known_names = {name for each in seen for name in names_in(each)}
        for each in states:
            if isinstance(each, SessionHistories):
                self._known_names.update(name for key in each.by_session for name in key if name)
        self._learn(states, told)

    def _told(self) -> list[Any]:
        """What lines and other rows tell of prompts or names, in order."""
        rows = (row for row in self._rows if row.kind != SNAPSHOT and row.value)
        return [self._codec.decode(row.value) for row in rows if row.topic not in _WORDLESS]

    def _learn(self, states: list[Any], told: list[Any]) -> None:
        prompts = self._prompts
        for each in told:
            if isinstance(each, Request):
                prompts.add(each)
        for each in states:
            if isinstance(each, LiveRequest):
                prompts.held(each.request, each.prior_tokens)
            elif isinstance(each, SessionHistories):
                prompts.remembered(each)
        for each in told:
            if isinstance(each, Retrieved):
                prompts.found(each)
            elif isinstance(each, Continued):
                prompts.said(each)

    def _restated(self, record: Any) -> Any:
        """A record with stand-ins."""
        if isinstance(record, Continued):
            record = replace(record, tokens=self._prompts.said(record))
            end = None if record.end is None else self._words.within(record.end)
            return replace(record, session_id=self._name(record.session_id), end=end)
        if isinstance(record, KvEvents):
            stored, removed = self._blocks(record.stored), self._blocks(record.removed)
            return replace(record, stored=stored, removed=removed)
        return self._words.within(record)

    def _blocks(self, packed_hashes: bytes) -> bytes:
        hashes = unpack(packed_hashes)
        return pack([name for value in hashes for name in self._prompts.blocks(value)])

    def _in_state(self, value: Any) -> Any:
        """What stands in a state in a value's place; records within it follow by themselves."""
        match value:
            case PrefixIndex():
                return value.map_hashes(self._prompts.blocks)
            case RequestCase():
                return replace(value, _chains={})
            case SessionHistory():
                return replace(value, digest=self._prompts.digest(value.digest))
            case Continued() | KvEvents():
                return self._restated(value)
        return self._words.in_own_fields(value)

    def _key(self, text: str) -> str:
        """What stands in a state for a text that no record has: in tables, these are names."""
        return self._name(text) if text in self._known_names else text

    def rows(self) -> Iterator[Row]:
        """The rows as they are to be written."""
        was: Router | None = None
        now: Router | None = None
        behind = ""
        for row in self._rows:
            if row.kind == RECORD:
                record = self._restated(self._codec.decode(row.value))
                yield row._replace(value=self._codec.encode(record))
            elif row.kind == LINE:
                assert was is not None and now is not None, "a life begins with a snapshot"
                yield row if row.topic == STOPPED else self._line(row, was, now)
            elif (row.router_id, row.router_epoch) in self._states:
                was = self._states.pop((row.router_id, row.router_epoch))
                now = restated(was, self._in_state, self._key)
                yield from self._snapshot(row, now)
            elif now is not None and behind != SNAPSHOT:  # a later one, in one part or several
                yield from self._snapshot(row, now)
            behind = row.kind

    def _snapshot(self, row: Row, router: Router) -> Iterator[Row]:
        first: JournalSnapshot = self._codec.decode(row.value)
        for part in in_parts(first, pack_router(router)):
            yield row._replace(value=self._codec.encode(part))

    def _line(self, row: Row, was: Router, now: Router) -> Row:
        content = content_of(self._codec, row.topic, row.value)
        other = content if row.topic in _WORDLESS else self._restated(content)
        recorded, restated_effects = (
            applied(router, event_of(row, each), row.now_ms)[0]
            for router, each in ((was, content), (now, other))
        )
        if effects_sum(self._codec, recorded) != row.effects:
            raise _not_made(row, "it is decided otherwise here than it was; record it as it is")
        if not self._same(recorded, restated_effects):
            raise _not_made(row, "without what was said it would be decided otherwise")
        value = row.value if other is content else self._codec.encode(other)
        return row._replace(value=value, effects=effects_sum(self._codec, restated_effects))

    def _same(self, recorded: Sequence[Effect], found: Sequence[Effect]) -> bool:
        if recorded == found:
            return True
        renamed = replace(_BLANK, name=self._name)
        return [*map(renamed.within, recorded)] == [*map(_BLANK.within, found)]


def _states(rows: Iterable[Row], codec: Codec) -> dict[tuple[str, int], Router]:
    """The router that each life begins with."""
    states: dict[tuple[str, int], bytes] = {}
    firsts: dict[tuple[str, int], int] = {}  # their numbers: later ones follow from these
    for row in rows:
        if row.kind == SNAPSHOT:
            life = row.router_id, row.router_epoch
            if row.seq == firsts.setdefault(life, row.seq):
                states[life] = states.get(life, b"") + codec.decode(row.value).state
    return {life: unpack_router(state) for life, state in states.items()}


def _not_made(row: Row, why: str) -> RecordError:
    return RecordError(
        f"{row.router_id} life {row.router_epoch}, line {row.seq} ({row.topic}): {why}, "
        "and see what `trivium replay` says"
    )
