"""Removes prompts, answers and texts from a recording, so that its replay still decides the same.

Theory of operation. The router core uses a prompt's length, and which other prompts share its
prefix: by block hashes, which workers also report for their caches, and by digests of a session's
earlier turns. So prompts get substitutes (`substitutes.py`) that share prefixes as the prompts did,
and block hashes become those of the substitutes (`prompts.py`). A hash of a prompt that is not in
the recording gets an arbitrary substitute.

Two routers then apply the recording side by side, one the original, one the substitutes. The
effects of the first must be those recorded. The effects of the second must be the same except for
words; their checksums are written. So a finished recording replays equal and decides what was
decided. Where that is impossible, no recording is made. Called by `collecting.py`.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import gcd
from typing import Any

from infra.replay.prompts import RedactedPrompts
from infra.replay.replaying import apply_event, content_of, event_of
from infra.replay.states import objects_in, restate
from infra.replay.substitutes import FieldSubstitutes, StandIns, names_in
from infra.traces.recording import LINE, RECORD, SNAPSHOT, RecordingRow
from schemas.codec import Codec
from schemas.errors import RecordError
from schemas.prefix import pack, unpack
from schemas.records import Continued, JournalSnapshot, KvEvents, Request, Retrieved
from streams.core.effects import Effect
from streams.core.placement.prefixes import PrefixIndex
from streams.core.requests.context import SessionHistories, SessionHistory
from streams.core.requests.live import LiveRequest, RequestCase
from streams.core.router import Router
from streams.journal.journal import STOPPED, TELLS_ID, effects_sum, in_parts
from streams.journal.snapshot import pack_router, unpack_router

_SALT_BYTES = 32
_WORDLESS = (*TELLS_ID, "fleet")
_BLANK = FieldSubstitutes(
    tokens=lambda tokens: bytes(len(tokens)),
    text=lambda text: "",  # messages contain request ids
    digest=lambda digest: "",
    name=str,
)


def redact(rows: Iterable[RecordingRow], *, names: bool = False) -> Iterator[RecordingRow]:
    """Return the rows without prompts, answers and texts, and with other names if `names` is set.

    Raises RecordError where the redacted rows would be decided differently.
    """
    return _Redaction(list(rows), names=names).rows()


class _Redaction:
    """Replaces prompts, texts and names of one recording."""

    def __init__(self, rows: list[RecordingRow], *, names: bool) -> None:
        self._rows, self._codec = rows, Codec()
        self._states = _states(rows, self._codec)
        states = [state for router in self._states.values() for state in objects_in(router)]
        records = self._decode_records()
        contents = [*states, *records]
        sizes = [
            s
            for content in contents
            if isinstance(content, PrefixIndex)
            for s in content.block_sizes
        ]
        sizes += [content.block_size for content in contents if isinstance(content, KvEvents)]
        splices = any(isinstance(content, Request) and content.retrieval for content in contents)
        stand_ins = StandIns(os.urandom(_SALT_BYTES), 1 if splices else gcd(*sizes) or 1)
        self._name = stand_ins.name if names else str
        self._prompts = RedactedPrompts(stand_ins, self._name, sizes)
        self._substitutes = self._prompts.substitutes
        self._known_names = {name for content in contents for name in names_in(content)}
        for state in states:
            if isinstance(state, SessionHistories):
                self._known_names.update(name for key in state.by_session for name in key if name)
        self._learn(states, records)

    def _decode_records(self) -> list[Any]:
        """Return the records of lines and other rows that may hold prompts or names, in order."""
        rows = (row for row in self._rows if row.kind != SNAPSHOT and row.value)
        return [self._codec.decode(row.value) for row in rows if row.topic not in _WORDLESS]

    def _learn(self, states: list[Any], records: list[Any]) -> None:
        prompts = self._prompts
        for record in records:
            if isinstance(record, Request):
                prompts.add(record)
        for state in states:
            if isinstance(state, LiveRequest):
                prompts.add_live(state.request, state.prior.tokens)
            elif isinstance(state, SessionHistories):
                prompts.add_histories(state)
        for record in records:
            if isinstance(record, Retrieved):
                prompts.add_retrieved(record)
            elif isinstance(record, Continued):
                prompts.stand_in_answer(record)

    def _restate(self, record: Any) -> Any:
        """Return a record with substitutes for its words."""
        if isinstance(record, Continued):
            record = replace(record, tokens=self._prompts.stand_in_answer(record))
            end = None if record.end is None else self._substitutes.replace_in(record.end)
            return replace(record, session_id=self._name(record.session_id), end=end)
        if isinstance(record, KvEvents):
            stored, removed = self._blocks(record.stored), self._blocks(record.removed)
            return replace(record, stored=stored, removed=removed)
        return self._substitutes.replace_in(record)

    def _blocks(self, packed_hashes: bytes) -> bytes:
        hashes = unpack(packed_hashes)
        return pack([name for value in hashes for name in self._prompts.blocks(value)])

    def _in_state(self, value: Any) -> Any:
        """Return the substitute of an object in a state; records in it are offered separately."""
        match value:
            case PrefixIndex():
                return value.map_hashes(self._prompts.blocks)
            case RequestCase():
                return replace(value, _chains={})
            case SessionHistory():
                return replace(value, digest=self._prompts.digest(value.digest))
            case Continued() | KvEvents():
                return self._restate(value)
        return self._substitutes.replace_in_own_fields(value)

    def _key(self, text: str) -> str:
        """Return the substitute of a text in a state's tables, if the text is a name."""
        return self._name(text) if text in self._known_names else text

    def rows(self) -> Iterator[RecordingRow]:
        """Yield the rows to write."""
        was: Router | None = None
        now: Router | None = None
        behind = ""
        for row in self._rows:
            if row.kind == RECORD:
                record = self._restate(self._codec.decode(row.value))
                yield row._replace(value=self._codec.encode(record))
            elif row.kind == LINE:
                assert was is not None and now is not None, "a life begins with a snapshot"
                yield row if row.topic == STOPPED else self._line(row, was, now)
            elif (row.router_id, row.router_epoch) in self._states:
                was = self._states.pop((row.router_id, row.router_epoch))
                now = restate(was, self._in_state, self._key)
                yield from self._snapshot(row, now)
            elif now is not None and behind != SNAPSHOT:  # a later snapshot, in one part or several
                yield from self._snapshot(row, now)
            behind = row.kind

    def _snapshot(self, row: RecordingRow, router: Router) -> Iterator[RecordingRow]:
        first: JournalSnapshot = self._codec.decode(row.value)
        for part in in_parts(first, pack_router(router)):
            yield row._replace(value=self._codec.encode(part))

    def _line(self, row: RecordingRow, was: Router, now: Router) -> RecordingRow:
        content = content_of(self._codec, row.topic, row.value)
        stand_in = content if row.topic in _WORDLESS else self._restate(content)
        recorded, restated_effects = (
            apply_event(router, event_of(row, payload), row.now_ms)[0]
            for router, payload in ((was, content), (now, stand_in))
        )
        if effects_sum(self._codec, recorded) != row.effects:
            raise _not_made(row, "it is decided otherwise here than it was; record it as it is")
        if not self._decides_same(recorded, restated_effects):
            raise _not_made(row, "without what was said it would be decided otherwise")
        value = row.value if stand_in is content else self._codec.encode(stand_in)
        return row._replace(value=value, effects=effects_sum(self._codec, restated_effects))

    def _decides_same(self, recorded: Sequence[Effect], effects: Sequence[Effect]) -> bool:
        if recorded == effects:
            return True
        renamed = replace(_BLANK, name=self._name)
        return [*map(renamed.replace_in, recorded)] == [*map(_BLANK.replace_in, effects)]


def _states(rows: Iterable[RecordingRow], codec: Codec) -> dict[tuple[str, int], Router]:
    """Return the router with which each incarnation begins."""
    states: dict[tuple[str, int], bytes] = {}
    firsts: dict[tuple[str, int], int] = {}  # their numbers; later snapshots follow from these
    for row in rows:
        if row.kind == SNAPSHOT:
            life = row.router_id, row.router_epoch
            if row.seq == firsts.setdefault(life, row.seq):
                states[life] = states.get(life, b"") + codec.decode(row.value).state
    return {life: unpack_router(state) for life, state in states.items()}


def _not_made(row: RecordingRow, why: str) -> RecordError:
    return RecordError(
        f"{row.router_id} life {row.router_epoch}, line {row.seq} ({row.topic}): {why}, "
        "and see what `trivium replay` says"
    )
