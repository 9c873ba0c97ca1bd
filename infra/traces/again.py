"""A recording's traffic once more, for a running cluster: the same prompts, and what came of them.

A prompt is the recorded tokens, with the recorded sampling and seed, so that an engine that answers
the same always does so here. Where a recording has no bodies, prompts and lengths are those of a
trace (`prompts.py`). Sends nothing; `trivium replay --live` does, by `sending.py`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from infra.replay.recording import opened
from infra.traces.from_log import asked_in, traced
from infra.traces.prompts import body
from infra.traces.sending import Sent
from infra.traces.trace import Arrival, Trace
from schemas.errors import RecordError
from schemas.records import Outcome, OutcomeKind, Request, Structured, StructuredKind
from schemas.rules.outcomes import counting_outcomes
from schemas.rules.tokens import unpack_tokens

BLOCK_TOKENS = 16  # how finely prompts are told apart that have to be made
_GUIDED = {
    StructuredKind.JSON_SCHEMA: "guided_json",
    StructuredKind.REGEX: "guided_regex",
    StructuredKind.GRAMMAR: "guided_grammar",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """A request that ended otherwise: how it ended then, and how it does now."""

    request_id: str
    then: str
    now: str


@dataclass(slots=True, kw_only=True)
class Compared:
    """What came of the same requests; times in ms."""

    completed_then: int = 0
    completed_now: int = 0
    same: int = 0  # that completed then, and did so for the same reason, with as many tokens
    differences: list[Difference] = field(default_factory=list)
    failed: int = 0  # of these, that do not complete any more
    times: dict[str, tuple[float, float]] = field(default_factory=dict)  # then, now


class Again:
    """One recording."""

    def __init__(self, path: Path) -> None:
        """Raises RecordError for a file that has no request that ended."""
        with opened(path) as recording:
            self._requests, outcomes = asked_in(recording)
            self.has_bodies = not recording.about.get("leaves_out")
        self._ends = counting_outcomes(outcomes)
        self.trace: Trace = traced(self._requests.values(), self._ends, BLOCK_TOKENS)
        if not self.trace.arrivals:
            raise RecordError(f"{path}: expected requests that have ended, found none")

    def asks(self, arrival: Arrival, model: str) -> dict[str, Any]:
        """The body of a call of `/v1/completions` that asks the same."""
        if not self.has_bodies:
            return body(self.trace, arrival, model)
        asked = _asked(self._requests[arrival.request_id], model)
        if self._kind(arrival) is OutcomeKind.CANCELLED:  # nobody cancels it now
            asked["max_tokens"] = max(1, arrival.output_tokens)
            asked["min_tokens"] = min(asked["min_tokens"], asked["max_tokens"])
        return asked

    def _kind(self, arrival: Arrival) -> OutcomeKind | None:
        end = self._ends.get(arrival.request_id)
        return None if end is None else end.kind

    def compared(self, sent: Sequence[Sent]) -> Compared:
        """How it went, beside how it went then."""
        found = Compared()
        both: list[Sent] = []
        for each in sent:
            end = self._ends[each.arrival.request_id]  # a trace has what ended
            is_whole = not each.error
            found.completed_now += is_whole
            if end.kind is not OutcomeKind.COMPLETED:
                continue
            found.completed_then += 1
            then = f"{end.finish_reason}, {end.completion_tokens} tokens"
            now = each.error or f"{each.finish_reason}, {each.output_tokens} tokens"
            both += [each] * is_whole
            found.failed += not is_whole
            if self._same(end, each):
                found.same += 1
            else:
                found.differences.append(Difference(each.arrival.request_id, then, now))
        found.times = _times(both)
        return found

    def _same(self, end: Outcome, sent: Sent) -> bool:
        """Without bodies all answers are as long as they are told to be."""
        reasons = sent.finish_reason, end.finish_reason
        as_long = sent.output_tokens == end.completion_tokens and not sent.error
        return as_long and (reasons[0] == reasons[1] or not self.has_bodies)


def _asked(request: Request, model: str) -> dict[str, Any]:
    sampling = request.sampling
    names = (
        *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("ignore_eos", "skip_special_tokens"),
    )
    lists = ("stop", "stop_token_ids", "bad_words")
    asked: dict[str, Any] = {name: getattr(sampling, name) for name in names}
    asked |= {name: list(found) for name in lists if (found := getattr(sampling, name))}
    if sampling.logit_bias:
        asked["logit_bias"] = dict(sampling.logit_bias)
    if sampling.structured is not None:
        asked |= _form(sampling.structured)
    return {
        **asked,
        "model": model,
        "prompt": unpack_tokens(request.prompt_tokens),
        "include_stop_str_in_output": sampling.include_stop,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _form(form: Structured) -> dict[str, Any]:
    if form.kind in _GUIDED:
        return {_GUIDED[form.kind]: form.value}
    if form.kind is StructuredKind.CHOICE:
        return {"guided_choice": json.loads(form.value)}
    return {"response_format": {"type": "json_object"}}


def _times(sent: Sequence[Sent]) -> dict[str, tuple[float, float]]:
    """Of answers that came whole then and now."""
    pairs = {
        "TTFT": [
            (each.arrival.ttft_ms, (each.chunks_s[0] - each.sent_s) * 1e3)
            for each in sent
            if each.chunks_s and each.arrival.ttft_ms is not None
        ],
        "latency": [
            (each.arrival.total_ms, (each.chunks_s[-1] - each.sent_s) * 1e3)
            for each in sent
            if each.chunks_s and each.arrival.total_ms is not None
        ],
    }
    found = {}
    for name, values in pairs.items():
        for percent in (50, 99) if values else ():
            then, now = np.percentile(np.array(values), percent, axis=0)
            found[f"{name} p{percent}"] = round(float(then), 1), round(float(now), 1)
    return found
