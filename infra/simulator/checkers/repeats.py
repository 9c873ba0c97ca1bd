"""Invariant 8: a later attempt generates after the same passages as an earlier one.

Uses records alone. Engines of a simulated cluster generate the same tokens whatever was inserted,
so this compares the passages, which would change the tokens of a real engine.
"""

from collections import Counter, defaultdict

from infra.simulator.cluster import Checker
from infra.simulator.log.bus import LOST
from schemas.records import Retrieved, TokenFrame, Work

_Stream = tuple[str, int]  # request and attempt
_Inserts = frozenset[tuple[int, bytes]]  # places and tokens


class Repeats(Checker):
    """A token that two attempts have sent was sampled after the same passages in both.

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
