"""Checks the passages in prompts: every attempt has those of the first search result.

Uses records alone, and inserts passages into prompts by its own code.
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
    """A search has one result, also after takeovers, and its reader is notified before the first
    token."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.results: dict[str, Retrieved] = {}  # the first result in the log
        self.notices: dict[str, StreamRetrieved] = {}
        self.counts: Counter[str] = Counter()  # what this run covered
        self._worked: set[str] = set()

    def on_record(self, topic: str, record: object, now_ms: float) -> None:
        """Check notices, tokens and work against the first search results."""
        if isinstance(record, Request) and record.retrieval is not None:
            self.requests.setdefault(record.request_id, record)
        elif isinstance(record, Retrieved) and not record.probe:
            first = self.results.setdefault(record.request_id, record)
            self.counts["answers"] += 1
            self.counts["second answers"] += first is not record
            self.counts["errors"] += first is record and record.error is not None
            self.counts["histories"] += first is record and bool(record.history)
            self.counts["changed documents"] += first is record and bool(record.changed)
        elif isinstance(record, TokenFrame):
            for notice in record.retrieved:
                if not notice.probe:
                    self._check_notice(notice)
            for request_id in record.request_ids:
                is_known = request_id in self.notices or request_id not in self.requests
                assert is_known, f"{request_id}: a token before its reader was told"
        elif isinstance(record, WarmPrefix):
            self.counts["beginnings"] += 1
        elif isinstance(record, Work) and record.request_id in self.requests:
            self._work(record)

    def _check_notice(self, notice: StreamRetrieved) -> None:
        name = notice.request_id
        assert name in self.requests, f"{name}: told of what nobody asked"
        first = self.notices.setdefault(name, notice)
        assert first == notice, f"{name}: told otherwise, {first} and {notice}"
        self.counts["repeated words"] += first is not notice
        self.counts["citations"] += len(notice.citations)

    def _work(self, work: Work) -> None:
        name = work.request_id
        assert name in self.results, f"{name}: work before its search has an outcome"
        assert name in self.notices, f"{name}: work before its reader was told"
        expected_prompt = expected(self.requests[name], self.results[name])
        prompt = work.prompt_tokens[: len(work.prompt_tokens) - work.prior_tokens * _TOKEN]
        assert prompt == expected_prompt, f"{name}: another prompt in attempt {work.attempt}"
        plain = self.requests[name].prompt_tokens
        assert self.notices[name].tokens == (len(expected_prompt) - len(plain)) // _TOKEN
        self.counts["works"] += 1
        self.counts["works with passages"] += expected_prompt != plain
        self._worked.add(name)

    def on_finish(self, cluster: Cluster) -> None:
        """Check that every completed request with a search had its work."""
        for request in cluster.clients.requests:
            outcome = request.outcome
            if outcome is not None and outcome.kind is OutcomeKind.COMPLETED:
                name = request.request_id
                assert name not in self.requests or name in self._worked, f"{name}: no work"


def expected(request: Request, result: Retrieved) -> bytes:
    """Return the expected prompt, assembled from its end to its beginning."""
    retrieval = request.retrieval
    assert retrieval is not None
    chosen_passages: list[bytes] = []
    budget_bytes = retrieval.tokens_max * _TOKEN
    for passage in result.passages if result.error is None else ():
        if len(chosen_passages) < retrieval.k and len(passage.tokens) <= budget_bytes:
            chosen_passages.append(passage.tokens)
            budget_bytes -= len(passage.tokens)
    places: list[tuple[int, bytes]] = []
    if chosen_passages:
        block = retrieval.lead + retrieval.joint.join(chosen_passages) + retrieval.trail
        places = [(retrieval.at, block), (retrieval.tail_at, retrieval.tail)]
    space_bytes = retrieval.room_tokens * _TOKEN - sum(len(tokens) for _, tokens in places)
    before: list[tuple[int, bytes]] = []
    changed_ids = set(result.changed)
    for insert in result.history:
        if insert.quoted and (result.error or {q.document_id for q in insert.quoted} & changed_ids):
            continue
        space_bytes -= len(insert.tokens)
        if space_bytes < 0:
            break
        before.append((insert.at, insert.tokens))
    prompt = request.prompt_tokens
    for at, tokens in reversed([*before, *places]):
        prompt = prompt[: at * _TOKEN] + tokens + prompt[at * _TOKEN :]
    return prompt
