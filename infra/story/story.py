"""Builds a request's story: all that the log has about it.

Free of I/O: `record_finder.py` finds the records, `steps.py` orders them by time. Times are those
of the processes that wrote the records, so between machines they are as accurate as the machines'
clocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from infra.story import searches
from schemas.codec import to_dict
from schemas.records import (
    Cancellation,
    CancelWork,
    Decision,
    Outcome,
    Phase,
    PhaseKind,
    Request,
    Resumption,
    Retrieved,
    TokenFrame,
    WarmPrefix,
    Work,
)
from schemas.rules.outcomes import counting_outcome
from schemas.rules.pairs import is_paired
from schemas.rules.tokens import token_count
from streams.calls.stream.parsed import ParsedAnswer, answer_of, deltas_by_row
from streams.calls.stream.stream import Stream


@dataclass(frozen=True, slots=True)
class TokenRow:
    """New tokens of the answer that arrived in one frame."""

    at_ms: int
    worker_id: str
    tokens: int


@dataclass(slots=True)
class Story:
    """All records of one request, and the tokens of its answer as its gateway sends them."""

    request: Request
    decisions: list[Decision] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    stops: list[CancelWork] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    retrieved: list[Retrieved] = field(default_factory=list)  # for the prompt, the first one counts
    warms: list[WarmPrefix] = field(default_factory=list)  # prefixes computed during a search
    cancellations: list[Cancellation] = field(default_factory=list)
    resumptions: list[Resumption] = field(default_factory=list)
    rows: list[TokenRow] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    differs_at: int | None = None  # the first token that a repetition changed
    repeated_rows: int = 0  # from a later attempt, or a paired worker
    outcome: Outcome | None = None
    answer: ParsedAnswer = field(default_factory=ParsedAnswer)  # as far as it is on the log
    reasoning_tokens: int = 0  # of a parsed answer that has ended

    @property
    def first_token_ms(self) -> int:
        """Return when the first token left its worker, in ms since 1970, or 0 if there is none."""
        return self.rows[0].at_ms if self.rows else 0

    @property
    def last_token_ms(self) -> int:
        """Return when the last token left; frames of two workers may be logged in another order."""
        return max((row.at_ms for row in self.rows), default=0)

    @property
    def ttft_ms(self) -> int | None:
        """Return the time from the arrival at the gateway to the first token's frame, in ms."""
        return self.first_token_ms - self.request.arrived_ms if self.rows else None

    @property
    def tpot_ms(self) -> float | None:
        """Return the mean time between tokens after the first, in ms."""
        count = len(self.token_ids) - 1
        return (self.last_token_ms - self.first_token_ms) / count if count > 0 else None

    @property
    def kv_bytes(self) -> int:
        """Return the bytes that went over NIXL.

        Of a paired attempt, both workers report the bytes that prefill wrote, and prefill those
        that it read.
        """
        paired = {work.attempt for work in self.work if is_paired(work.orchestration)}
        total = sum(phase.kv_read_bytes for phase in self.phases)
        for attempt in {phase.attempt for phase in self.phases}:
            phases = [phase for phase in self.phases if phase.attempt == attempt]
            prefill = sum(p.kv_bytes for p in phases if p.kind is PhaseKind.PREFILL_DONE)
            decode = sum(p.kv_bytes for p in phases if p.kind is not PhaseKind.PREFILL_DONE)
            total += max(prefill, decode) if attempt in paired else prefill + decode
        return total

    def as_dict(self) -> dict[str, Any]:
        """Return the records and derived figures for JSON; rows' times count from arrival."""
        start_ms = self.request.arrived_ms
        rows = [[row.at_ms - start_ms, row.worker_id, row.tokens] for row in self.rows]
        return {
            "request": _without_prompt(self.request),
            "decisions": [to_dict(decision) for decision in self.decisions],
            "work": [_without_prompt(work) for work in self.work],
            "stops": [to_dict(stop) for stop in self.stops],
            "phases": [to_dict(phase) for phase in self.phases],
            "retrieved": [searches.retrieved_value(retrieved) for retrieved in self.retrieved],
            "warms": [_without_prompt(warm) for warm in self.warms],
            "cancellations": [to_dict(record) for record in self.cancellations],
            "resumptions": [to_dict(record) for record in self.resumptions],
            "tokens": {
                "count": len(self.token_ids),
                "token_ids": self.token_ids,
                "ttft_ms": self.ttft_ms,
                "tpot_ms": self.tpot_ms,
                "rows": rows,
                "repeated_rows": self.repeated_rows,
                "differs_at": self.differs_at,
            },
            "answer": {
                "content": self.answer.content,
                "reasoning": self.answer.reasoning,
                "reasoning_tokens": self.reasoning_tokens,
                "tool_calls": [call.to_json() for call in self.answer.calls.values()],
            },
            "kv_bytes": self.kv_bytes,
            "outcome": to_dict(self.outcome) if self.outcome is not None else None,
        }


def _without_prompt(record: Request | Work | WarmPrefix) -> dict[str, Any]:
    value = {**to_dict(record), "prompt_tokens": token_count(record.prompt_tokens)}
    if isinstance(record, Request) and record.retrieval is not None:
        value["retrieval"] = searches.wish_value(record.retrieval)
    if isinstance(record, Work) and record.probes is not None:
        value["probes"] = searches.probes_value(record.probes)
    return value


def build_stories(requests: Iterable[Request], records: Iterable[Any]) -> dict[str, Story]:
    """Return stories by request id. Records of one topic and partition must be in log order."""
    stories = {request.request_id: Story(request) for request in requests}
    streams = {request_id: Stream(request_id) for request_id in stories}
    for record in records:
        if isinstance(record, TokenFrame):
            _fold_frame(stories, streams, record)
        elif (story := stories.get(getattr(record, "request_id", ""))) is not None:
            _fold(story, record)
    for request_id, stream in streams.items():
        stories[request_id].repeated_rows = stream.repeated_rows
        stories[request_id].differs_at = stream.differs_at
        stories[request_id].answer = answer_of(stream)
        if stream.end is not None:
            stories[request_id].reasoning_tokens = stream.end.reasoning_tokens
    return stories


def _fold(story: Story, record: Any) -> None:
    match record:
        case Decision():
            story.decisions.append(record)
        case Work():
            story.work.append(record)
        case CancelWork():
            story.stops.append(record)
        case Phase():
            story.phases.append(record)
        case Retrieved():
            story.retrieved.append(record)
        case WarmPrefix():
            story.warms.append(record)
        case Cancellation():
            story.cancellations.append(record)
        case Resumption():
            story.resumptions.append(record)
        case Outcome():
            story.outcome = counting_outcome(filter(None, (story.outcome, record)))


def _fold_frame(stories: dict[str, Story], streams: dict[str, Stream], frame: TokenFrame) -> None:
    place = 0
    deltas = deltas_by_row(frame)
    columns = (frame.request_ids, frame.attempts, frame.first_seqs, frame.first_chars)
    for request_id, attempt, seq, char, count, text in zip(
        *columns, frame.token_counts, frame.texts, strict=True
    ):
        tokens = frame.token_ids[place : place + count]
        place += count
        stream = streams.get(request_id)
        if stream is None:
            continue
        row_deltas = deltas.get((request_id, attempt, seq), ())
        new = stream.push(attempt, seq, char, count, text, tokens, deltas=row_deltas)
        if new:
            story = stories[request_id]
            story.rows.append(TokenRow(frame.at_ms, frame.worker_id, new))
            story.token_ids += stream.token_ids
            stream.token_ids = []
    for void in frame.voids:
        if void.request_id in streams:
            streams[void.request_id].void(void.attempt)
    for end in frame.ends:
        if end.request_id in streams:
            streams[end.request_id].finish(end)
