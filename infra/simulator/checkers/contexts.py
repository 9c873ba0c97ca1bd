"""What stands in prompts: the first answer to a search, in every attempt, and its reader knows.

Keeps books of records alone, and puts passages into prompts by code of its own.
"""

from collections import Counter

from infra.simulator.cluster import Checker, Cluster
from schemas.records import (
    OutcomeKind,
    Request,
    Retrieved,
    StreamRetrieved,
    TokenFrame,
    WarmPrefix,
    Work,
)

_TOKEN = 4


class Contexts(Checker):
    """One outcome of each search, the same prompt before and after takeovers, told before the
    first token."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.found: dict[str, Retrieved] = {}  # the first in the log
        self.told: dict[str, StreamRetrieved] = {}
        self.seen: Counter[str] = Counter()  # what this run was about
        self._worked: set[str] = set()

    def wrote(self, topic: str, record: object, now_ms: float) -> None:
        """Keep the books."""
        if isinstance(record, Request) and record.retrieval is not None:
            self.requests.setdefault(record.request_id, record)
        elif isinstance(record, Retrieved) and not record.probe:
            first = self.found.setdefault(record.request_id, record)
            self.seen["answers"] += 1
            self.seen["second answers"] += first is not record
            self.seen["errors"] += first is record and record.error is not None
            self.seen["histories"] += first is record and bool(record.history)
            self.seen["changed documents"] += first is record and bool(record.changed)
        elif isinstance(record, TokenFrame):
            for told in record.retrieved:
                if not told.probe:
                    self._tell(told)
            for request_id in record.request_ids:
                is_known = request_id in self.told or request_id not in self.requests
                assert is_known, f"{request_id}: a token before its reader was told"
        elif isinstance(record, WarmPrefix):
            self.seen["beginnings"] += 1
        elif isinstance(record, Work) and record.request_id in self.requests:
            self._work(record)

    def _tell(self, told: StreamRetrieved) -> None:
        name = told.request_id
        assert name in self.requests, f"{name}: told of what nobody asked"
        first = self.told.setdefault(name, told)
        assert first == told, f"{name}: told otherwise, {first} and {told}"
        self.seen["repeated words"] += first is not told
        self.seen["citations"] += len(told.citations)

    def _work(self, work: Work) -> None:
        name = work.request_id
        assert name in self.found, f"{name}: work before its search has an outcome"
        assert name in self.told, f"{name}: work before its reader was told"
        wanted = expected(self.requests[name], self.found[name])
        prompt = work.prompt_tokens[: len(work.prompt_tokens) - work.said * _TOKEN]
        assert prompt == wanted, f"{name}: another prompt in attempt {work.attempt}"
        plain = self.requests[name].prompt_tokens
        assert self.told[name].tokens == (len(wanted) - len(plain)) // _TOKEN
        self.seen["works"] += 1
        self.seen["works with passages"] += wanted != plain
        self._worked.add(name)

    def finished(self, cluster: Cluster) -> None:
        """Whoever was answered was told."""
        for served in cluster.clients.served:
            outcome = served.outcome
            if outcome is not None and outcome.kind is OutcomeKind.COMPLETED:
                name = served.request_id
                assert name not in self.requests or name in self._worked, f"{name}: no work"


def expected(request: Request, found: Retrieved) -> bytes:
    """The prompt, put together from its end to its beginning."""
    wanted = request.retrieval
    assert wanted is not None
    taken: list[bytes] = []
    left = wanted.tokens_max * _TOKEN
    for passage in found.passages if found.error is None else ():
        if len(taken) < wanted.k and len(passage.tokens) <= left:
            taken.append(passage.tokens)
            left -= len(passage.tokens)
    places: list[tuple[int, bytes]] = []
    if taken:
        block = wanted.lead + wanted.joint.join(taken) + wanted.trail
        places = [(wanted.at, block), (wanted.tail_at, wanted.tail)]
    room = wanted.room_tokens * _TOKEN - sum(len(tokens) for _, tokens in places)
    before: list[tuple[int, bytes]] = []
    gone = set(found.changed)
    for insert in found.history:
        if insert.quoted and (found.error or {q.document_id for q in insert.quoted} & gone):
            continue
        room -= len(insert.tokens)
        if room < 0:
            break
        before.append((insert.at, insert.tokens))
    prompt = request.prompt_tokens
    for at, tokens in reversed([*before, *places]):
        prompt = prompt[: at * _TOKEN] + tokens + prompt[at * _TOKEN :]
    return prompt
