"""Invariants 1 and 2: which tokens of an answer are in the log, and which its client receives.

Engines of a simulated cluster generate, at each place of an answer, a number and a letter that
follow from the request's id, its model and adapter, and the place; this module computes both
again.
"""

from collections import defaultdict
from collections.abc import Sequence
from zlib import crc32

from infra.simulator.cluster import Checker, Cluster
from infra.simulator.members.clients import ClientRequest
from infra.simulator.members.router import ROUTER
from infra.simulator.models import NAMES, answer_name
from schemas.records import (
    Decision,
    DecisionKind,
    Orchestration,
    Outcome,
    OutcomeKind,
    Phase,
    PhaseKind,
    Request,
    TokenFrame,
    Usage,
    Work,
    WorkPhase,
)

Stream = tuple[str, int]  # request and attempt
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def expected(name: str, first: int, count: int) -> tuple[list[int], str]:
    """Return the numbers and letters of an answer from place `first` on; `name` is that of
    `answer_name`."""
    base = crc32(name.encode()) % 256
    numbers = [number % 256 for number in range(base + first, base + first + count)]
    letter = (base % 26 + first) % 26
    return numbers, (_LETTERS * (1 + (letter + count) // 26))[letter : letter + count]


class AnswerLogChecker(Checker):
    """Rows have the expected tokens without a gap; reports come after their tokens."""

    def __init__(self) -> None:
        self._tokens: defaultdict[Stream, int] = defaultdict(int)  # number of tokens in the log
        self._ended_streams: set[Stream] = set()
        self._names: dict[str, str] = {}  # of answers, by request
        self._pairs: dict[Stream, str] = {}  # prefill worker of each paired stream

    def on_record(self, topic: str, record: object, now_ms: float) -> None:
        """Check the tokens, phases and outcomes of all streams."""
        if isinstance(record, TokenFrame):
            self._frame(record)
        elif isinstance(record, Request):
            name = answer_name(record.request_id, record.model, record.adapter)
            self._names.setdefault(record.request_id, name)
        elif isinstance(record, Work):
            stream = record.request_id, record.attempt
            self._tokens[stream] = max(self._tokens[stream], record.prior_tokens)
            if record.phase is WorkPhase.PREFILL and record.orchestration in (
                Orchestration.DECODE_FIRST,
                Orchestration.CONCURRENT,
            ):
                self._pairs[stream] = record.worker_id
        elif isinstance(record, Phase) and record.kind is PhaseKind.PREFILL_DONE:
            stream = record.request_id, record.attempt
            paired = stream in self._pairs  # the prefill worker's token may come later
            assert paired or record.sent_tokens <= self._tokens[stream], (
                f"{stream}: handed over before its token is in the log"
            )
        elif isinstance(record, Outcome) and record.kind is OutcomeKind.COMPLETED:
            stream = record.request_id, record.attempt
            ends = [end for end in self._ended_streams if end[0] == record.request_id]
            if record.written_by != ROUTER:
                ends = [end for end in ends if end == stream]
            # A router completes an answer of a void attempt if its readers have all of it.
            assert ends, f"{stream}: completed before its end is in the log"
            counts = [self._tokens[end] for end in ends]
            assert record.completion_tokens in counts, (
                f"{stream}: completed with {record.completion_tokens} tokens, the log has {counts}"
            )

    def _frame(self, frame: TokenFrame) -> None:
        at = 0
        rows = zip(
            *(frame.request_ids, frame.attempts, frame.first_seqs, frame.first_chars),
            *(frame.token_counts, frame.texts),
            strict=True,
        )
        for request_id, attempt, first, first_char, count, text in rows:
            stream = request_id, attempt
            ids, at = list(frame.token_ids[at : at + count]), at + count
            assert first_char == first, f"{stream}: text of another place"
            answers = [expected(name, first, count) for name in self._names_of(request_id)]
            assert (ids, text) in answers, f"{stream}: other tokens"
            assert first <= self._tokens[stream], f"{stream}: a gap before token {first}"
            late = frame.worker_id == self._pairs.get(stream) and first + count == 1
            assert late or stream not in self._ended_streams, f"{stream}: tokens after the end"
            self._tokens[stream] = max(self._tokens[stream], first + count)
        self._ended_streams.update((end.request_id, end.attempt) for end in frame.ends)

    def _names_of(self, request_id: str) -> list[str]:
        """Return the name of a request's answer; all possible ones if its work was forged."""
        name = self._names.get(request_id)
        return [answer_name(request_id, *name) for name in NAMES] if name is None else [name]


class ClientChecker(Checker):
    """Clients receive each token of their answers once, in order, whatever dies in between."""

    def __init__(self) -> None:
        self._places: defaultdict[str, int] = defaultdict(int)

    def on_tokens(self, request: ClientRequest, tokens: Sequence[int], text: str) -> None:
        """Check the next tokens of an answer."""
        name = request.request_id
        answer = answer_name(name, request.model, request.adapter)
        expected_answer = expected(answer, self._places[name], len(tokens))
        assert (list(tokens), text) == expected_answer, (
            f"{name}: other tokens at {self._places[name]}"
        )
        self._places[name] += len(tokens)

    def on_finish(self, cluster: Cluster) -> None:
        """Check that clients received completed answers as a whole."""
        for request in cluster.clients.requests:
            name = request.request_id
            assert not request.lacks_tokens or cluster.bus.lost_records, (
                f"{name}: the log has its tokens"
            )
            assert not request.differs, f"{request.request_id}: an attempt said something else"
            if request.completed and not request.has_left:
                places = self._places[request.request_id]
                assert places == request.output_tokens, f"{request.request_id}: heard {places}"


_Life = tuple[str, int]  # worker and epoch
_PLACING = (DecisionKind.PLACE, DecisionKind.REPLACE)


class AttemptNumbers(Checker):
    """Work of an attempt goes to one worker per phase, and attempt numbers only grow.

    Uses records alone. A router that dies may leave work in the log without its decision, and one
    that slept may assume that it still owns its requests; clients would see neither.
    """

    def __init__(self) -> None:
        self._at: dict[tuple[str, int, WorkPhase], _Life] = {}
        self._decided_attempts: dict[str, int] = {}  # the highest attempt with a decision
        self._work_attempts: dict[str, int] = {}  # the highest attempt with work

    def on_record(self, topic: str, record: object, now_ms: float) -> None:
        """Check the attempt numbers of work, decisions and usage."""
        if isinstance(record, Work):
            self._work(record)
        elif isinstance(record, Decision) and record.kind in _PLACING:
            last = self._decided_attempts.get(record.request_id, 0)
            name = f"{record.request_id}: attempt {record.attempt}"
            assert record.attempt > last, f"{name} is placed after attempt {last}"
            self._decided_attempts[record.request_id] = record.attempt
        elif isinstance(record, Usage):
            last, name = self._work_attempts.get(record.request_id, 0), record.request_id
            assert record.attempt >= last, f"{name}: ended by attempt {record.attempt}, void"

    def _work(self, work: Work) -> None:
        name = f"{work.request_id}: attempt {work.attempt}"
        last = self._work_attempts.get(work.request_id, 0)
        assert work.attempt >= last, f"{name} is given out after attempt {last}"
        self._work_attempts[work.request_id] = work.attempt
        life = work.worker_id, work.worker_epoch
        first_life = self._at.setdefault((work.request_id, work.attempt, work.phase), life)
        assert first_life == life, f"{name} is given to {first_life} and to {life}"
