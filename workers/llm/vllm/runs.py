"""The active requests of a vLLM engine, and which of them have stalled. Pure: time is an argument.

vLLM does not report a hang, so the adapter must distinguish one from a queue. Three rules:
- Silence: the engine reports every step, for any request. If it reports nothing for the progress
  timeout while there are requests, it is frozen, and all of them fail.
- No token: it reports steps, but no request gets a token for the progress timeout. Those that have
  begun fail.
- No first token: a request waits for the first-token timeout although nothing blocks it. A full
  batch, full KV memory, or as many other adapters in the batch as it may use block it. Every older
  request that begins or ends meanwhile restarts its clock, because the queue moves. So does a peer
  that has not written the KV yet; that wait has a limit of its own. So a long queue is no failure,
  and a read that hangs is one, even on a busy engine.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from schemas.errors import TriviumError
from schemas.records import KvHandle
from workers.llm.engine import Job, Output
from workers.llm.vllm.continued.stops import ContinuedStops

_KV_FULL = 0.95


@dataclass(slots=True, eq=False)
class VllmRun:
    """One job in the engine."""

    job: Job
    max_tokens: int
    hands_over: bool
    clock_s: float  # since when nothing blocks its first token
    kv_params: dict[str, Any] | None = None
    source: KvHandle | None = None  # a peer's KV that it reads or awaits
    missed: TriviumError | None = None  # why it did not get that KV
    awaited_ms: int = 0  # until when a peer may write KV into its blocks; 0: no peer writes
    tokens: list[int] = field(default_factory=list)  # generated ones, if its KV is to be kept
    has_begun: bool = False
    has_sampled: bool = False
    cached_tokens: int = 0
    task: asyncio.Task[None] | None = None
    deadline: asyncio.TimerHandle | None = None
    stops: ContinuedStops | None = None  # if the answer is continued and has stop strings
    repeated_chars: int = 0  # characters of the prompt at the start of the first text

    def new_text(self, text: str) -> str:
        """Return the part of a text that is not repeated from the prompt."""
        if self.repeated_chars and text:
            text, self.repeated_chars = text[self.repeated_chars :], 0
        return text


@dataclass(slots=True)
class ActiveRuns:
    """Active runs in order of arrival."""

    running_max: int
    first_token_timeout_s: float
    progress_timeout_s: float
    adapters_max: int = 0  # different adapters in a batch
    active: dict[str, VllmRun] = field(default_factory=dict)
    since_s: float = 0.0  # since when there are runs
    token_s: float = 0.0  # time of the last token of any run

    def __iter__(self) -> Iterator[VllmRun]:
        return iter(tuple(self.active.values()))

    def add(self, run: VllmRun, now_s: float) -> None:
        """Add a run that the engine gets now."""
        if not self.active:
            self.since_s = now_s
        self.active[run.job.request_id] = run

    def holds(self, run: VllmRun) -> bool:
        """Return whether this run is still active; a later run may have the same request id."""
        return self.active.get(run.job.request_id) is run

    def begin(self, run: VllmRun, now_s: float) -> None:
        """Note that a run has its first token."""
        run.has_begun = True
        self._move(run, now_s)

    def remove(self, run: VllmRun, now_s: float) -> None:
        """Remove a run that has ended; the queue moves for those behind it."""
        self._move(run, now_s)
        del self.active[run.job.request_id]

    def _move(self, run: VllmRun, now_s: float) -> None:
        """Restart the clocks of the later runs that have not begun."""
        for later_run in reversed(self.active.values()):
            if later_run is run:
                return
            if not later_run.has_begun:
                later_run.clock_s = now_s

    def stalled(
        self, now_s: float, reported_s: float, kv_usage: float
    ) -> list[tuple[VllmRun, str]]:
        """Return the runs that have failed by the module's rules, with the reason."""
        if not self.active:
            return []
        silence_s = now_s - max(reported_s, self.since_s)
        if silence_s >= self.progress_timeout_s:
            return [(run, f"the engine was silent for {silence_s:.1f} s") for run in self]
        failures, busy_adapters = [], {run.job.adapter for run in self if run.has_begun} - {""}
        are_adapters_full = len(busy_adapters) >= self.adapters_max
        quiet_s = now_s - max(self.token_s, self.since_s)
        if quiet_s >= self.progress_timeout_s:
            failures += [(run, f"no token for {quiet_s:.1f} s") for run in self if run.has_begun]
        for older, run in enumerate(self):
            if run.has_begun:
                continue
            adapter = run.job.adapter
            must_wait = adapter and adapter not in busy_adapters and are_adapters_full
            if older >= self.running_max or kv_usage > _KV_FULL or run.awaited_ms or must_wait:
                run.clock_s = now_s
            waited_s = now_s - run.clock_s
            if waited_s >= self.first_token_timeout_s:
                failures.append(
                    (run, f"no first token in {waited_s:.1f} s with nothing in the way")
                )
        return failures


class Mailbox:
    """Outputs that wait for the worker; a slow worker gets one merged output per request."""

    def __init__(self) -> None:
        self._outputs: list[Output] = []

    def __len__(self) -> int:
        return len(self._outputs)

    def put(self, output: Output) -> None:
        """Add an output of the engine."""
        self._outputs.append(output)

    def take(self) -> list[Output]:
        """Return one output per request; outputs of a later run with the same id stay here."""
        outputs, self._outputs = self._outputs, []
        merged: dict[str, Output] = {}
        for output in outputs:
            previous = merged.get(output.request_id)
            if previous is None:
                merged[output.request_id] = output
            elif previous.finish_reason or any(
                later.request_id == output.request_id for later in self._outputs
            ):
                self._outputs.append(output)
            else:
                merged[output.request_id] = _join_outputs(previous, output)
        return list(merged.values())


def _join_outputs(first: Output, second: Output) -> Output:
    return replace(
        second,
        token_ids=(*first.token_ids, *second.token_ids),
        text=first.text + second.text,
        logprobs=(*first.logprobs, *second.logprobs),
        kv_bytes=first.kv_bytes + second.kv_bytes,
        transfer_ms=first.transfer_ms + second.transfer_ms,
        kv_missed=first.kv_missed or second.kv_missed,
    )
