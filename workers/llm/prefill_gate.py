"""Limits how many prompts the engine computes at once; further prefill jobs wait here in order.

A prompt counts until its first token is sampled; KV that waits for its peer does not count. Pure;
`workers/llm/active_requests.py` passes it every job, and it calls `Engine.add`.
"""

from schemas.records import WorkPhase
from workers.llm.engine import Job, Jobs


class PrefillGate:
    """A gate with `running_max` places in front of `engine`; 0: no limit."""

    def __init__(self, engine: Jobs, running_max: int) -> None:
        self._engine, self._running_max = engine, running_max
        self._running: set[str] = set()  # job ids
        self._waiting: dict[str, Job] = {}

    def __len__(self) -> int:
        """Return the number of prefill jobs that wait."""
        return len(self._waiting)

    @property
    def tokens(self) -> int:
        """Return the number of prompt tokens that wait."""
        return sum(len(job.prompt_tokens) for job in self._waiting.values())

    def add(self, job: Job) -> None:
        """Pass a job to the engine, now or when an earlier prompt is computed."""
        if job.phase is not WorkPhase.PREFILL or not self._running_max:
            self._engine.add(job)
            return
        self._waiting[job.request_id] = job
        self._admit()

    def release(self, job_id: str) -> None:
        """Free the place of a prompt that is computed or dropped; ignore other jobs."""
        if self._running_max:
            self._running.discard(job_id)
            self._waiting.pop(job_id, None)
            self._admit()

    def clear(self) -> None:
        """Drop all waiting jobs; their requests are ending."""
        self._waiting.clear()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._running_max:
            job_id = next(iter(self._waiting))
            self._running.add(job_id)
            self._engine.add(self._waiting.pop(job_id))
