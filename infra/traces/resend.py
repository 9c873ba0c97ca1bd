"""Prepares a recording's traffic for a running cluster again, and compares the outcomes.

A prompt is the recorded tokens, with the recorded sampling and seed, so that a deterministic engine
gives the same answer. Where a recording has no bodies, prompts and lengths are those of a trace
(`prompts.py`). It sends nothing itself; `trivium trace send` does, by `sender.py`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from infra.traces.from_log import requests_in, trace_of
from infra.traces.prompts import body
from infra.traces.recording import open_recording
from infra.traces.sender import SentRequest
from infra.traces.trace import Arrival, Trace
from schemas.errors import RecordError
from schemas.records import Outcome, OutcomeKind, Request, Structured, StructuredKind
from schemas.rules.outcomes import counting_outcomes
from schemas.rules.tokens import unpack_tokens

BLOCK_TOKENS = 16  # the granularity of shared prefixes in generated prompts
_GUIDED = {
    StructuredKind.JSON_SCHEMA: "guided_json",
    StructuredKind.REGEX: "guided_regex",
    StructuredKind.GRAMMAR: "guided_grammar",
}


@dataclass(frozen=True, slots=True)
class OutcomeDifference:
    """A request whose outcome differs: the recorded outcome and the present one."""

    request_id: str
    then: str
    now: str


@dataclass(slots=True, kw_only=True)
class ResendComparison:
    """Outcomes of the same requests, recorded and present; times in ms."""

    completed_then: int = 0
    completed_now: int = 0
    same: int = 0  # completed both times, with the same finish reason and as many tokens
    differences: list[OutcomeDifference] = field(default_factory=list)
    failed: int = 0  # of `completed_then`, requests that do not complete now
    times: dict[str, tuple[float, float]] = field(default_factory=dict)  # (recorded, present)


class Resend:
    """Makes the requests of one recording again, and compares how they end."""

    def __init__(self, path: Path) -> None:
        """Read the recording. Raises RecordError for a file without a finished request."""
        with open_recording(path) as recording:
            self._requests, outcomes = requests_in(recording)
            self.has_bodies = not recording.about.get("leaves_out")
        self._ends = counting_outcomes(outcomes)
        self.trace: Trace = trace_of(self._requests.values(), self._ends, BLOCK_TOKENS)
        if not self.trace.arrivals:
            raise RecordError(f"{path}: expected requests that have ended, found none")

    def make_body(self, arrival: Arrival, model: str) -> dict[str, Any]:
        """Return the body of a call of `/v1/completions` that makes the same request."""
        if not self.has_bodies:
            return body(self.trace, arrival, model)
        payload = _request_body(self._requests[arrival.request_id], model)
        if self._kind(arrival) is OutcomeKind.CANCELLED:  # no client cancels it now
            payload["max_tokens"] = max(1, arrival.output_tokens)
            payload["min_tokens"] = min(payload["min_tokens"], payload["max_tokens"])
        return payload

    def _kind(self, arrival: Arrival) -> OutcomeKind | None:
        end = self._ends.get(arrival.request_id)
        return None if end is None else end.kind

    def compare(self, requests: Sequence[SentRequest]) -> ResendComparison:
        """Return the present outcomes beside the recorded ones."""
        comparison = ResendComparison()
        both: list[SentRequest] = []
        for request in requests:
            end = self._ends[request.arrival.request_id]  # a trace has only requests that ended
            is_whole = not request.error
            comparison.completed_now += is_whole
            if end.kind is not OutcomeKind.COMPLETED:
                continue
            comparison.completed_then += 1
            then = f"{end.finish_reason}, {end.completion_tokens} tokens"
            now = request.error or f"{request.finish_reason}, {request.output_tokens} tokens"
            both += [request] * is_whole
            comparison.failed += not is_whole
            if self._is_same_end(end, request):
                comparison.same += 1
            else:
                comparison.differences.append(
                    OutcomeDifference(request.arrival.request_id, then, now)
                )
        comparison.times = _times(both)
        return comparison

    def _is_same_end(self, end: Outcome, request: SentRequest) -> bool:
        """Return whether both ended alike; without bodies only the fixed lengths count."""
        reasons = request.finish_reason, end.finish_reason
        as_long = request.output_tokens == end.completion_tokens and not request.error
        return as_long and (reasons[0] == reasons[1] or not self.has_bodies)


def _request_body(request: Request, model: str) -> dict[str, Any]:
    sampling = request.sampling
    names = (
        *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("ignore_eos", "skip_special_tokens"),
    )
    lists = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")
    payload: dict[str, Any] = {name: getattr(sampling, name) for name in names}
    payload |= {name: list(values) for name in lists if (values := getattr(sampling, name))}
    if sampling.logit_bias:
        payload["logit_bias"] = dict(sampling.logit_bias)
    if sampling.structured is not None:
        payload |= _form(sampling.structured)
    return {
        **payload,
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
    if form.kind is StructuredKind.STRUCTURAL_TAG:
        return {"structured_outputs": {"structural_tag": form.value}}
    return {"response_format": {"type": "json_object"}}


def _times(requests: Sequence[SentRequest]) -> dict[str, tuple[float, float]]:
    """Return percentiles of the answers that were complete both times, recorded and present."""
    pairs = {
        "TTFT": [
            (request.arrival.ttft_ms, (request.chunks_s[0] - request.sent_s) * 1e3)
            for request in requests
            if request.chunks_s and request.arrival.ttft_ms is not None
        ],
        "latency": [
            (request.arrival.total_ms, (request.chunks_s[-1] - request.sent_s) * 1e3)
            for request in requests
            if request.chunks_s and request.arrival.total_ms is not None
        ],
    }
    times = {}
    for name, values in pairs.items():
        for percent in (50, 99) if values else ():
            then, now = np.percentile(np.array(values), percent, axis=0)
            times[f"{name} p{percent}"] = round(float(then), 1), round(float(now), 1)
    return times
