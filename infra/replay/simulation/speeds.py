"""Measures how fast recorded workers were: linear fits to their phases and outcomes.

A prompt takes a fixed time plus a time per uncached token. A step of the batch takes a fixed time,
plus a time per answer in it and per prompt computed beside it. Prompts that waited or overlapped
with others are left out if enough remain. What the recorded placements never did cannot be
measured: without a local prompt, local prompts are assumed to take as long as others and to slow no
answer.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from infra.replay.simulation.traffic import RecordedTraffic
from schemas.records import Mode, PhaseKind

_FEWEST = 10  # observations for a fit; with fewer, the median
_HOPS_MAX, _HOP_MS = 20_000, 3.0  # _HOP_MS: the default if no hop was recorded


@dataclass(frozen=True, slots=True)
class LinearFit:
    """A line: `base` plus `slope` per unit."""

    base: float
    slope: float = 0.0

    def at(self, x: float) -> float:
        return self.base + self.slope * x


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSpeeds:
    """Times of a simulated worker, in ms; delays over the log are the recorded ones."""

    prompt: LinearFit  # by tokens computed
    append: LinearFit  # by tokens computed, if a prefix was cached
    step: LinearFit  # by answers in the batch
    beside: float = 0.0  # ms added to a step per prompt computed beside it
    transfer: LinearFit  # by bytes of KV
    requests_ms: tuple[float, ...]  # delays from the gateway to the router
    hops_ms: tuple[float, ...]  # delays of other records to their readers
    ack_ms: float = 0.0  # until a worker learns that a token is in the log and reports its phase
    kv_bytes_per_token: int
    prompts_max: int = 8  # computed at once


@dataclass(frozen=True, slots=True)
class _Prompt:
    worker: str
    began_ms: float
    ended_ms: float
    computed: int
    cached: int


@dataclass(frozen=True, slots=True)
class _Answer:
    worker: str
    began_ms: float
    ended_ms: float
    tokens: int


def measure_speeds(traffic: RecordedTraffic) -> MeasuredSpeeds:
    """Fit the speeds of all workers together."""
    prompts, answers = _prompts(traffic), _answers(traffic)
    alone = _lone_prompts(prompts)
    fresh = [prompt for prompt in alone if not prompt.cached] or alone
    cached = [prompt for prompt in alone if prompt.cached] or fresh
    decoders = {answer.worker for answer in answers}
    decoder_prompts = [prompt for prompt in prompts if prompt.worker in decoders]
    base, per_answer, beside = _steps(answers, decoder_prompts)
    hops = _hops(traffic)
    return MeasuredSpeeds(
        prompt=_prompt_line(fresh),
        append=_prompt_line(cached),
        step=LinearFit(base, per_answer),
        beside=beside,
        transfer=_transfer(traffic),
        requests_ms=_requests(traffic),
        hops_ms=hops,
        ack_ms=max(0.0, _handover_ms(traffic) - 2 * float(np.median(hops))),
        kv_bytes_per_token=_kv_bytes(traffic),
    )


def _prompts(traffic: RecordedTraffic) -> list[_Prompt]:
    """Return the prompts with their times, of prefill workers and of workers that computed
    locally."""
    prompts = [
        _Prompt(
            phase.worker_id,
            phase.started_ms,
            phase.ended_ms - phase.transfer_ms,
            phase.prompt_tokens - phase.cached_tokens,
            phase.cached_tokens,
        )
        for phase in traffic.phases
        if phase.kind is PhaseKind.PREFILL_DONE
    ]
    for outcome in traffic.completed:
        if outcome.mode is not Mode.REMOTE and outcome.worker_ms and outcome.attempt == 1:
            began_ms, computed = outcome.ended_ms - outcome.worker_ms, outcome.prompt_tokens
            prompts.append(
                _Prompt(
                    outcome.decode_worker,
                    began_ms,
                    outcome.first_token_ms,
                    computed - outcome.cached_tokens,
                    outcome.cached_tokens,
                )
            )
    return [prompt for prompt in prompts if prompt.ended_ms >= prompt.began_ms]


def _answers(traffic: RecordedTraffic) -> list[_Answer]:
    """Return the answers with the times at which their worker decoded them."""
    received = {
        phase.request_id: phase.ended_ms
        for phase in traffic.phases
        if phase.kind is PhaseKind.KV_RECEIVED
    }
    answers = []
    for outcome in traffic.completed:
        began_ms = max(received.get(outcome.request_id, 0), outcome.first_token_ms)
        if outcome.completion_tokens > 1 and outcome.ended_ms > began_ms:
            answers.append(
                _Answer(
                    outcome.decode_worker, began_ms, outcome.ended_ms, outcome.completion_tokens - 1
                )
            )
    return answers


def _lone_prompts(prompts: Sequence[_Prompt]) -> Sequence[_Prompt]:
    """Return the prompts that overlapped with no other on their worker; all if these are too
    few."""
    by_worker: defaultdict[str, list[_Prompt]] = defaultdict(list)
    for prompt in sorted(prompts, key=lambda prompt: prompt.began_ms):
        by_worker[prompt.worker].append(prompt)
    lone_prompts = []
    for queue in by_worker.values():
        until_ms = 0.0
        for prompt, after in zip(queue, [*queue[1:], None], strict=True):
            if prompt.began_ms >= until_ms and (after is None or after.began_ms >= prompt.ended_ms):
                lone_prompts.append(prompt)
            until_ms = max(until_ms, prompt.ended_ms)
    return lone_prompts if len(lone_prompts) >= _FEWEST else prompts


def _prompt_line(prompts: Sequence[_Prompt]) -> LinearFit:
    return _line(
        [prompt.computed for prompt in prompts],
        [prompt.ended_ms - prompt.began_ms for prompt in prompts],
    )


def _line(x: Sequence[float], y: Sequence[float]) -> LinearFit:
    """Fit a line by least squares, without outliers and with no negative coefficient."""
    if not y:
        return LinearFit(0.0)
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    keep = np.ones(len(ys), bool)
    slope, base = 0.0, float(np.median(ys))
    for _ in range(3):
        if keep.sum() < _FEWEST or np.ptp(xs[keep]) == 0:
            break
        slope, base = (float(coefficient) for coefficient in np.polyfit(xs[keep], ys[keep], 1))
        if slope < 0 or base < 0:
            slope = max(0.0, slope) if base >= 0 else float(xs @ ys / (xs @ xs))
            base = max(0.0, float(np.median(ys[keep] - slope * xs[keep])))
        residuals = np.abs(ys - base - slope * xs)
        keep = residuals <= 4 * max(0.5, float(np.median(residuals)))
    return LinearFit(base, slope)


def _steps(answers: Sequence[_Answer], prompts: Sequence[_Prompt]) -> tuple[float, float, float]:
    """Return the time of a step, and the time that each answer and each prompt beside it adds."""
    if not answers:
        return 1.0, 0.0, 0.0
    tpot = np.array([(answer.ended_ms - answer.began_ms) / answer.tokens for answer in answers])
    batch, beside = (
        np.array([_mean_overlap(answer, answers) for answer in answers]),
        np.zeros(len(answers)),
    )
    if prompts:
        beside = np.array([_mean_overlap(answer, prompts) for answer in answers])
    columns = [np.ones(len(answers))]
    varies = [np.ptp(batch) > 0, np.ptp(beside) > 0]
    columns += [column for column, is_seen in zip((batch, beside), varies, strict=True) if is_seen]
    if len(answers) < _FEWEST * len(columns):
        return float(np.median(tpot)), 0.0, 0.0
    coefficients, *_ = np.linalg.lstsq(np.stack(columns, 1), tpot, rcond=None)
    rest = iter(coefficients[1:])
    per_answer, per_prompt = (max(0.0, float(next(rest))) if fits else 0.0 for fits in varies)
    base = float(np.median(tpot - per_answer * batch - per_prompt * beside))
    return max(0.1, base), per_answer, per_prompt


def _mean_overlap(answer: _Answer, spans: Sequence[_Answer] | Sequence[_Prompt]) -> float:
    """Return the mean number of spans that ran on the answer's worker meanwhile."""
    starts_ms = np.array([span.began_ms for span in spans])
    ends_ms = np.array([span.ended_ms for span in spans])
    is_here = np.array([span.worker == answer.worker for span in spans])
    shared_ms = np.minimum(ends_ms, answer.ended_ms) - np.maximum(starts_ms, answer.began_ms)
    return float(shared_ms[is_here & (shared_ms > 0)].sum() / (answer.ended_ms - answer.began_ms))


def _transfer(traffic: RecordedTraffic) -> LinearFit:
    moved = [p for p in traffic.phases if p.kv_bytes and p.transfer_ms]
    return _line([phase.kv_bytes for phase in moved], [phase.transfer_ms for phase in moved])


def _requests(traffic: RecordedTraffic) -> tuple[float, ...]:
    """Return delays from gateways to the router, of requests that did not wait in its queue."""
    delays_ms = [
        float(placed.at_ms - traffic.requests[request_id].arrived_ms)
        for request_id, placed in traffic.placements.items()
        if request_id in traffic.requests and placed.attempt == 1 and not placed.queue_length
    ]
    return _hop_samples(delays_ms)


def _hops(traffic: RecordedTraffic) -> tuple[float, ...]:
    """Return delays from the router to workers that started at once."""
    starts_ms = {
        phase.request_id: phase.started_ms
        for phase in traffic.phases
        if phase.kind is PhaseKind.PREFILL_DONE and phase.attempt == 1
    }
    for outcome in traffic.completed:
        if outcome.mode is not Mode.REMOTE and outcome.attempt == 1 and outcome.worker_ms:
            starts_ms[outcome.request_id] = int(outcome.ended_ms - outcome.worker_ms)
    delays_ms = [
        float(began_ms - traffic.placements[request_id].at_ms)
        for request_id, began_ms in starts_ms.items()
        if request_id in traffic.placements
    ]
    return _hop_samples(delays_ms)


def _hop_samples(delays_ms: Sequence[float]) -> tuple[float, ...]:
    return tuple(max(0.0, delay_ms) for delay_ms in delays_ms[:_HOPS_MAX]) or (_HOP_MS,)


def _handover_ms(traffic: RecordedTraffic) -> float:
    """Return the median delay from a prompt's end to its start on the decode worker."""
    ends_ms, starts_ms = {}, {}
    for phase in traffic.phases:
        if phase.kind is PhaseKind.PREFILL_DONE and not phase.transfer_ms:
            ends_ms[phase.request_id] = phase.ended_ms
        elif phase.kind is PhaseKind.KV_RECEIVED:
            starts_ms[phase.request_id] = phase.started_ms
    gaps_ms = [
        starts_ms[request_id] - ends_ms[request_id]
        for request_id in starts_ms.keys() & ends_ms.keys()
    ]
    gaps_ms = [gap_ms for gap_ms in gaps_ms if gap_ms >= 0]  # negative in pairs
    return float(np.median(gaps_ms)) if gaps_ms else 0.0


def _kv_bytes(traffic: RecordedTraffic) -> int:
    capabilities = [w.registration.capability for w in traffic.workers]
    return max(
        (capability.kv_bytes_per_token for capability in capabilities if capability is not None),
        default=0,
    )


def summarize(speeds: MeasuredSpeeds) -> Mapping[str, float]:
    """Return the speeds as named figures for reports."""
    requests, hops = np.asarray(speeds.requests_ms), np.asarray(speeds.hops_ms)
    return {
        "prompt_ms": speeds.prompt.base,
        "prompt_ms_per_token": speeds.prompt.slope,
        "append_ms": speeds.append.base,
        "append_ms_per_token": speeds.append.slope,
        "step_ms": speeds.step.base,
        "step_ms_per_answer": speeds.step.slope,
        "step_ms_per_prompt": speeds.beside,
        "transfer_ms": speeds.transfer.base,
        "transfer_ms_per_mb": speeds.transfer.slope * 1e6,
        "request_ms_p50": float(np.median(requests)),
        "request_ms_p99": float(np.percentile(requests, 99)),
        "hop_ms_p50": float(np.median(hops)),
        "hop_ms_p99": float(np.percentile(hops, 99)),
    }
