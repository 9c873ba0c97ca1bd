"""How fast the workers of a recording were: lines through what their phases and outcomes tell.

A prompt takes a time and one per token that was not cached, a step of the batch a time, one per
answer in it, and more while prompts are computed beside it. Prompts that waited, or overlapped with
others, are left out where enough did not. What the recorded placements never did is not known:
without a local prompt, local ones are thought to take what others do, and to slow nobody.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from infra.prediction.traffic import Traffic
from schemas.records import Mode, PhaseKind

_FEWEST = 10  # observations of a line; with fewer there is a mean
_HOPS_MAX, _HOP_MS = 20_000, 3.0  # where none was seen


@dataclass(frozen=True, slots=True)
class Line:
    """`base` and so much per unit."""

    base: float
    slope: float = 0.0

    def at(self, x: float) -> float:
        return self.base + self.slope * x


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What a simulated worker takes, in ms; hops over the log are as they were seen."""

    prompt: Line  # by tokens computed
    append: Line  # likewise, where the beginning was cached
    step: Line  # by answers in the batch
    beside: float = 0.0  # ms that a step takes longer per prompt computed beside it
    transfer: Line  # by bytes of KV
    requests_ms: tuple[float, ...]  # each request's way to its router
    hops_ms: tuple[float, ...]  # other records' ways to their readers
    ack_ms: float = 0.0  # until a worker knows that a token is in the log, and tells its phase
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


def measured(traffic: Traffic) -> Speeds:
    """Of all workers together."""
    prompts, answers = _prompts(traffic), _answers(traffic)
    alone = _alone(prompts)
    fresh = [each for each in alone if not each.cached] or alone
    cached = [each for each in alone if each.cached] or fresh
    decoders = {each.worker for each in answers}
    here = [each for each in prompts if each.worker in decoders]
    base, per_answer, beside = _steps(answers, here)
    hops = _hops(traffic)
    return Speeds(
        prompt=_prompt_line(fresh),
        append=_prompt_line(cached),
        step=Line(base, per_answer),
        beside=beside,
        transfer=_transfer(traffic),
        requests_ms=_requests(traffic),
        hops_ms=hops,
        ack_ms=max(0.0, _handed_over(traffic) - 2 * float(np.median(hops))),
        kv_bytes_per_token=_kv_bytes(traffic),
    )


def _prompts(traffic: Traffic) -> list[_Prompt]:
    """Prompts with when they were computed, on prefill workers and where the answers were."""
    found = [
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
    for each in traffic.completed:
        if each.mode is not Mode.REMOTE and each.worker_ms and each.attempt == 1:
            began_ms, computed = each.ended_ms - each.worker_ms, each.prompt_tokens
            found.append(
                _Prompt(
                    each.decode_worker,
                    began_ms,
                    each.first_token_ms,
                    computed - each.cached_tokens,
                    each.cached_tokens,
                )
            )
    return [each for each in found if each.ended_ms >= each.began_ms]


def _answers(traffic: Traffic) -> list[_Answer]:
    """Answers with when their worker drew them."""
    received = {
        phase.request_id: phase.ended_ms
        for phase in traffic.phases
        if phase.kind is PhaseKind.KV_RECEIVED
    }
    found = []
    for each in traffic.completed:
        began_ms = max(received.get(each.request_id, 0), each.first_token_ms)
        if each.completion_tokens > 1 and each.ended_ms > began_ms:
            found.append(
                _Answer(each.decode_worker, began_ms, each.ended_ms, each.completion_tokens - 1)
            )
    return found


def _alone(prompts: Sequence[_Prompt]) -> Sequence[_Prompt]:
    """Those that met no other on their worker; all, where they are too few."""
    by_worker: defaultdict[str, list[_Prompt]] = defaultdict(list)
    for each in sorted(prompts, key=lambda each: each.began_ms):
        by_worker[each.worker].append(each)
    found = []
    for queue in by_worker.values():
        until_ms = 0.0
        for each, after in zip(queue, [*queue[1:], None], strict=True):
            if each.began_ms >= until_ms and (after is None or after.began_ms >= each.ended_ms):
                found.append(each)
            until_ms = max(until_ms, each.ended_ms)
    return found if len(found) >= _FEWEST else prompts


def _prompt_line(prompts: Sequence[_Prompt]) -> Line:
    return _line(
        [each.computed for each in prompts], [each.ended_ms - each.began_ms for each in prompts]
    )


def _line(x: Sequence[float], y: Sequence[float]) -> Line:
    """Least squares, without those far from it, and never downward."""
    if not y:
        return Line(0.0)
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    keep = np.ones(len(ys), bool)
    slope, base = 0.0, float(np.median(ys))
    for _ in range(3):
        if keep.sum() < _FEWEST or np.ptp(xs[keep]) == 0:
            break
        slope, base = (float(each) for each in np.polyfit(xs[keep], ys[keep], 1))
        if slope < 0 or base < 0:
            slope = max(0.0, slope) if base >= 0 else float(xs @ ys / (xs @ xs))
            base = max(0.0, float(np.median(ys[keep] - slope * xs[keep])))
        off = np.abs(ys - base - slope * xs)
        keep = off <= 4 * max(0.5, float(np.median(off)))
    return Line(base, slope)


def _steps(answers: Sequence[_Answer], prompts: Sequence[_Prompt]) -> tuple[float, float, float]:
    """What a step takes, per answer in the batch, and per prompt beside it."""
    if not answers:
        return 1.0, 0.0, 0.0
    tpot = np.array([(each.ended_ms - each.began_ms) / each.tokens for each in answers])
    batch, beside = np.array([_met(each, answers) for each in answers]), np.zeros(len(answers))
    if prompts:
        beside = np.array([_met(each, prompts) for each in answers])
    columns = [np.ones(len(answers))]
    wanted = [np.ptp(batch) > 0, np.ptp(beside) > 0]
    columns += [column for column, is_seen in zip((batch, beside), wanted, strict=True) if is_seen]
    if len(answers) < _FEWEST * len(columns):
        return float(np.median(tpot)), 0.0, 0.0
    found, *_ = np.linalg.lstsq(np.stack(columns, 1), tpot, rcond=None)
    rest = iter(found[1:])
    per_answer, per_prompt = (max(0.0, float(next(rest))) if seen else 0.0 for seen in wanted)
    base = float(np.median(tpot - per_answer * batch - per_prompt * beside))
    return max(0.1, base), per_answer, per_prompt


def _met(answer: _Answer, others: Sequence[_Answer] | Sequence[_Prompt]) -> float:
    """How many of these there were on its worker meanwhile, on average; itself too."""
    began = np.array([each.began_ms for each in others])
    ended = np.array([each.ended_ms for each in others])
    here = np.array([each.worker == answer.worker for each in others])
    together = np.minimum(ended, answer.ended_ms) - np.maximum(began, answer.began_ms)
    return float(together[here & (together > 0)].sum() / (answer.ended_ms - answer.began_ms))


def _transfer(traffic: Traffic) -> Line:
    moved = [p for p in traffic.phases if p.kv_bytes and p.transfer_ms]
    return _line([each.kv_bytes for each in moved], [each.transfer_ms for each in moved])


def _requests(traffic: Traffic) -> tuple[float, ...]:
    """From gateways to the router, of what did not wait there."""
    found = [
        float(placed.at_ms - traffic.requests[request_id].arrived_ms)
        for request_id, placed in traffic.placed.items()
        if request_id in traffic.requests and placed.attempt == 1 and not placed.queue_length
    ]
    return _drawn_from(found)


def _hops(traffic: Traffic) -> tuple[float, ...]:
    """From the router to workers that began at once."""
    begun = {
        each.request_id: each.started_ms
        for each in traffic.phases
        if each.kind is PhaseKind.PREFILL_DONE and each.attempt == 1
    }
    for each in traffic.completed:
        if each.mode is not Mode.REMOTE and each.attempt == 1 and each.worker_ms:
            begun[each.request_id] = int(each.ended_ms - each.worker_ms)
    found = [
        float(began_ms - traffic.placed[request_id].at_ms)
        for request_id, began_ms in begun.items()
        if request_id in traffic.placed
    ]
    return _drawn_from(found)


def _drawn_from(found: Sequence[float]) -> tuple[float, ...]:
    return tuple(max(0.0, each) for each in found[:_HOPS_MAX]) or (_HOP_MS,)


def _handed_over(traffic: Traffic) -> float:
    """From the end of a prompt to the decode worker that was told of it by the router."""
    done, begun = {}, {}
    for phase in traffic.phases:
        if phase.kind is PhaseKind.PREFILL_DONE and not phase.transfer_ms:
            done[phase.request_id] = phase.ended_ms
        elif phase.kind is PhaseKind.KV_RECEIVED:
            begun[phase.request_id] = phase.started_ms
    took = [begun[each] - done[each] for each in begun.keys() & done.keys()]
    took = [each for each in took if each >= 0]  # of pairs decode begins first
    return float(np.median(took)) if took else 0.0


def _kv_bytes(traffic: Traffic) -> int:
    told = [w.registration.capability for w in traffic.workers]
    return max((each.kv_bytes_per_token for each in told if each is not None), default=0)


def shown(speeds: Speeds) -> Mapping[str, float]:
    """For reports."""
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
