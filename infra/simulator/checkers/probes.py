"""Invariant 8, searches during answers: results are logged, then announced, then repeated.

Every later attempt has the results of earlier ones. Uses records alone.
"""

from collections import Counter, defaultdict

from infra.simulator.cluster import Checker
from infra.simulator.log.bus import LOST
from schemas.records import Retrieved, TokenFrame, Work

_Stream = tuple[str, int]  # request and attempt
_Inserts = frozenset[tuple[int, bytes]]  # places and tokens


class ProbeChecker(Checker):
    """No token at or after a probe's place is sent before the probe's result is in the log."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # what this run covered
        self._tokens: defaultdict[_Stream, int] = defaultdict(int)  # number of tokens in the log
        self._written: dict[tuple[str, int, int], Retrieved] = {}  # by stream and probe
        self._notices: set[tuple[str, int]] = set()
        self._works: dict[_Stream, Work] = {}

    def on_record(self, topic: str, record: object, now_ms: float) -> None:
        """Check search results, tokens and work of probes."""
        if isinstance(record, Retrieved) and record.probe:
            self._retrieved(record)
        elif isinstance(record, TokenFrame):
            self._frame(record)
        elif isinstance(record, Work) and record.probes is not None:
            self._work(record)

    def _retrieved(self, record: Retrieved) -> None:
        stream = record.request_id, record.attempt
        name = f"probe {record.probe} of {stream}"
        assert self._tokens[stream] <= record.seq, f"{name}: tokens left before it"
        key = (*stream, record.probe)
        assert key not in self._written, f"{name}: decided twice"
        probes = self._works[stream].probes
        assert probes is not None and record.probe > probes.decided, f"{name}: asked again"
        self._written[key] = record
        self.counts["put in"] += bool(record.tokens)
        self.counts["nothing new"] += not record.tokens and record.error is None
        self.counts["late"] += record.error is not None and record.error.code == "deadline_exceeded"
        self.counts["failed"] += record.error is not None

    def _frame(self, frame: TokenFrame) -> None:
        for notice in frame.retrieved:
            if notice.probe:
                self._notices.add((notice.request_id, notice.probe))
        rows = zip(
            *(frame.request_ids, frame.attempts, frame.first_seqs, frame.token_counts), strict=True
        )
        for request_id, attempt, first, count in rows:
            stream, last = (request_id, attempt), first + count
            self._tokens[stream] = max(self._tokens[stream], last)
            for (name, its_attempt, probe), record in self._written.items():
                if (name, its_attempt) == stream and record.tokens and last > record.seq:
                    assert (name, probe) in self._notices, f"probe {probe} of {stream}: not told"
        for end in frame.ends:
            self.counts["ends with passages"] += end.retrieved_tokens > 0
            self.counts["stalls"] += end.stalled_ms > 0

    def _work(self, work: Work) -> None:
        """Check that a later attempt gets the results of earlier ones that its router knew."""
        self._works[work.request_id, work.attempt] = work
        assert work.probes is not None
        places = [insert.at for insert in work.probes.inserts]
        assert places == sorted(places) and len(places) == work.probes.decided
        for number, insert in enumerate(work.probes.inserts, start=1):
            records = [
                record
                for (name, _, probe), record in self._written.items()
                if (name, probe) == (work.request_id, number)
            ]
            same = any(
                (record.seq, record.tokens) == (insert.at, insert.tokens) for record in records
            )
            assert same, f"{work.request_id}: probe {number} as nobody has written it"
        self.counts["works that repeat"] += any(insert.tokens for insert in work.probes.inserts)


class Repeats(Checker):
    """A token that two attempts have sent was sampled after the same passages in both.

    Engines of a simulated cluster generate the same tokens whatever was inserted, so this compares
    the passages, which would change the tokens of a real engine.

    Exempt are passages that the later attempt has inserted itself: an engine that sends several
    tokens at a time may have passed a place at which it had not searched yet. Exempt are also
    tokens that no client receives: after the mark that their attempt is void, after those of a
    later attempt, or after an answer's end.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # what this run covered
        self._router_inserts: dict[_Stream, _Inserts] = {}  # inserted by the router
        self._attempt_inserts: defaultdict[_Stream, _Inserts] = defaultdict(frozenset)
        self._behind: defaultdict[str, dict[int, _Inserts]] = defaultdict(dict)  # by place
        self._min_attempts: defaultdict[str, int] = defaultdict(
            int
        )  # clients receive this attempt, or later ones
        self._ended_ids: set[str] = set()

    def on_record(self, topic: str, record: object, now_ms: float) -> None:
        """Note inserted passages, and check the tokens after them."""
        if isinstance(record, Work) and record.probes is not None:
            inserts = (
                (insert.at, insert.tokens) for insert in record.probes.inserts if insert.tokens
            )
            self._router_inserts.setdefault((record.request_id, record.attempt), frozenset(inserts))
        elif isinstance(record, Retrieved) and record.tokens:
            self._attempt_inserts[record.request_id, record.attempt] |= {
                (record.seq, record.tokens)
            }
        elif isinstance(record, TokenFrame) and topic != LOST:
            self._frame(record)

    def _frame(self, frame: TokenFrame) -> None:
        rows = zip(
            *(frame.request_ids, frame.attempts, frame.first_seqs, frame.token_counts), strict=True
        )
        for request_id, attempt, first, count in rows:
            stream, inserts_by_place = (request_id, attempt), self._behind[request_id]
            if request_id in self._ended_ids or attempt < self._min_attempts[request_id]:
                continue
            self._min_attempts[request_id] = attempt
            attempt_inserts, router_inserts = (
                self._attempt_inserts[stream],
                self._router_inserts.get(stream, frozenset()),
            )
            for place in range(first, first + count):
                behind = _before(attempt_inserts | router_inserts, place)
                before = inserts_by_place.setdefault(place, behind)
                name = f"token {place} of {request_id} in attempt {attempt}"
                assert before <= behind, f"{name}: without what was put in before it"
                assert behind - before <= attempt_inserts, (
                    f"{name}: behind what was not put in before it"
                )
                self.counts["repeated behind passages"] += before is not behind and bool(before)
        for end in frame.ends:
            if end.attempt >= self._min_attempts[end.request_id]:
                self._ended_ids.add(end.request_id)
        for void in frame.voids:
            min_attempt = self._min_attempts[void.request_id]
            self._min_attempts[void.request_id] = max(min_attempt, void.attempt + 1)


def _before(put_in: _Inserts, place: int) -> _Inserts:
    return frozenset(insert for insert in put_in if insert[0] <= place) if put_in else put_in
