"""A resumed answer continues where its readers' tokens end: neither earlier nor later.

Uses records alone: for each answer, the consecutive tokens in the log before the mark that makes an
attempt void. Tokens of the attempt after the mark do not count.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

from infra.simulator.checkers.answers import expected
from infra.simulator.cluster import Checker
from infra.simulator.log.bus import LOST
from infra.simulator.members.clients import ClientRequest
from infra.simulator.models import answer_name
from schemas.records import Continued, Request, TokenFrame, Work

_Stream = tuple[str, int]  # request and attempt
_TOKEN_BYTES = 4


class ContinuationChecker(Checker):
    """Work begins after the tokens that readers have, and no token is computed again."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # what this run covered
        self._rows: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
        self._tokens_at_mark: dict[_Stream, int] = {}  # tokens at the first mark of an attempt
        self._continued: dict[_Stream, Continued] = {}  # the first one of each attempt
        self._prior_tokens: dict[_Stream, int] = {}
        self._token_limits: dict[
            str, tuple[int, int]
        ] = {}  # void attempt, most tokens that the client may receive
        self._client_tokens: Counter[str] = Counter()
        self._searching: set[str] = set()  # search during answers: these restart

    def on_record(self, topic: str, record: object, now_ms: float) -> None:
        """Record tokens, marks and continuations, and check work."""
        if isinstance(record, TokenFrame):
            self._frame(record, is_lost=topic == LOST)
        elif isinstance(record, Continued):
            stream = record.request_id, record.attempt
            self._continued.setdefault(stream, record)
            assert stream in self._tokens_at_mark, f"{stream}: told of, and nobody asked"
        elif isinstance(record, Work):
            self._work(record)
        elif isinstance(record, Request) and record.retrieval is not None:
            if record.retrieval.probing is not None:
                self._searching.add(record.request_id)

    def _frame(self, frame: TokenFrame, *, is_lost: bool) -> None:
        rows = zip(
            *(frame.request_ids, frame.attempts, frame.first_seqs, frame.token_counts), strict=True
        )
        for request_id, attempt, first, count in rows:
            stream = request_id, attempt
            assert first >= self._prior_tokens.get(stream, 0), (
                f"{stream}: token {first} is computed again"
            )
            if stream in self._tokens_at_mark:
                self.counts["tokens behind a mark"] += 1
            elif not is_lost:
                self._rows[request_id].append((attempt, first, count))
            if attempt > self._token_limits.get(request_id, (attempt, 0))[0]:
                del self._token_limits[request_id]
        for end in frame.ends:
            self._token_limits.pop(end.request_id, None)
        for void in frame.voids:
            stream = void.request_id, void.attempt
            if stream not in self._tokens_at_mark:
                had = self._tokens_at_mark[stream] = self._in_a_row(void.request_id)
                if not is_lost:  # else readers never see the mark
                    self._token_limits[void.request_id] = void.attempt, had

    def on_tokens(self, request: ClientRequest, tokens: Sequence[int], text: str) -> None:
        """Check that no token after a mark is received before the next attempt's tokens or an
        end."""
        name = request.request_id
        self._client_tokens[name] += len(tokens)
        attempt, limit = self._token_limits.get(name, (0, self._client_tokens[name]))
        assert self._client_tokens[name] <= limit, (
            f"{name}: heard of attempt {attempt} behind its mark"
        )

    def _in_a_row(self, request_id: str) -> int:
        """Return the number of consecutive tokens that a reader of the log has of the answer."""
        have, latest, waiting = 0, 0, list[tuple[int, int]]()
        for attempt, first, count in self._rows[request_id]:
            if attempt > latest:
                latest, waiting = attempt, []
            if attempt == latest:
                waiting.append((first, first + count))
            for begin, end in sorted(waiting):
                have = max(have, end) if begin <= have else have
        return have

    def _work(self, work: Work) -> None:
        stream, before = (work.request_id, work.attempt), (work.request_id, work.attempt - 1)
        self._prior_tokens[stream] = work.prior_tokens
        self.counts["placed again"] += work.attempt > 1
        if not work.prior_tokens:
            continued = self._continued.get(before)
            may_go_on = (
                continued is not None
                and continued.tokens
                and work.request_id not in self._searching
            )
            assert not may_go_on, f"{stream}: begins anew, with an answer so far"
            return
        self.counts["gone on"] += 1
        assert work.prior_tokens == self._tokens_at_mark[before], (
            f"{stream}: goes on behind {work.prior_tokens} tokens"
        )
        name = answer_name(work.request_id, work.model, work.adapter)
        tokens, _ = expected(name, 0, work.prior_tokens)
        packed = b"".join(token.to_bytes(_TOKEN_BYTES, "little") for token in tokens)
        assert work.prompt_tokens.endswith(packed), f"{stream}: behind another answer"
        assert work.prior_chars == work.prior_tokens, f"{stream}: its text is behind its tokens"
