"""A layer between the rules of a worker and its engine that lets answers search. Pure.

To `workers/llm/active_requests.py` it is the engine: an answer that searches is one job with one
id, although several engine jobs may produce it. `workers/loops.py`, or the simulator, passes it the
engine's outputs, the results of searches, written records and the time. Other jobs pass unchanged.
"""

from collections.abc import Callable, Sequence

from schemas.records import Retrieved
from workers.llm.engine import Job, Jobs, Output
from workers.llm.probing.answer import ProbeAsk, ProbedAnswer

Ask = Callable[[ProbeAsk], None]
Write = Callable[[Retrieved], None]


class _Running:
    """An answer and its current job; carries out the answer's `Actions`."""

    def __init__(self, owner: "ProbingJobs", job: Job) -> None:
        self.base_id = self.job_id = job.request_id
        self.answer = ProbedAnswer(job, owner.model_len, self)
        self._owner = owner

    def ask(self, ask: ProbeAsk) -> None:
        self._owner.asked_total += 1
        self._owner.ask(ask)

    def write(self, record: Retrieved) -> None:
        self._owner.write(record)

    def go_on(self, job: Job) -> None:
        self._owner.engine.abort(self.job_id)
        self._owner.move(self, job.request_id)
        self._owner.engine.add(job)

    def stop(self) -> None:
        self._owner.engine.abort(self.job_id)

    def texts(self, before: Sequence[int], output: Output) -> Sequence[str]:
        return self._owner.engine.texts(before, output)


class ProbingJobs:
    """Jobs of an engine; `step` takes the engine's outputs and returns those to send now."""

    def __init__(self, engine: Jobs, ask: Ask, write: Write, *, model_len: int = 0) -> None:
        """Create one; `ask` starts a search, `write` queues a record; neither calls back at once.
        `model_len` is the model's token limit, 0: none.
        """
        self.engine, self.ask, self.write = engine, ask, write
        self.model_len = model_len
        self.asked_total = 0
        self._stalled_ms = 0.0  # of answers that have ended
        self._answers: dict[str, _Running] = {}  # by id of the first job
        self._running: dict[str, _Running] = {}  # by id of the current job

    def __len__(self) -> int:
        """Return the number of active answers that search."""
        return len(self._answers)

    @property
    def stalled_ms(self) -> float:
        """Return how many ms decoding was stalled by searches, over all answers."""
        return self._stalled_ms + sum(
            running.answer.stalled_ms for running in self._answers.values()
        )

    def add(self, job: Job) -> None:
        """Pass a job to the engine, or the first job of an answer that searches."""
        probes = None if job.work is None else job.work.probes
        probing = None if probes is None else probes.retrieval.probing
        if (
            probing is None
            or job.sampling.structured is not None
            or job.request_id in self._answers
        ):
            self.engine.add(job)
            return
        running = _Running(self, job)
        self._answers[job.request_id] = self._running[job.request_id] = running
        self.engine.add(running.answer.begin())

    def abort(self, request_id: str) -> None:
        """Stop a request by its current job."""
        running = self._answers.get(request_id)
        if running is not None:
            self._forget(running)
        self.engine.abort(request_id if running is None else running.job_id)

    def move(self, running: _Running, job_id: str) -> None:
        """Set an answer's current job; later outputs of the former one are dropped."""
        del self._running[running.job_id]
        running.job_id = job_id
        self._running[job_id] = running

    def texts(self, before: Sequence[int], output: Output) -> Sequence[str]:
        """Return what each token of an output adds to the text, from the engine."""
        return self.engine.texts(before, output)

    def _forget(self, running: _Running) -> None:
        self._stalled_ms += running.answer.stalled_ms
        del self._answers[running.base_id], self._running[running.job_id]

    def step(self, outputs: Sequence[Output], now_ms: int) -> Sequence[Output]:
        """Take the outputs of one engine step; return those that may be sent now."""
        if not self._answers:
            return outputs
        ready_outputs: list[Output] = []
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is not None:
                ready_outputs += self._settle(running, running.answer.take(output, now_ms))
            elif output.request_id not in self._answers:  # otherwise its job was replaced
                ready_outputs.append(output)
        return ready_outputs

    def take_result(self, result: Retrieved, seeds: Sequence[str], now_ms: int) -> list[Output]:
        """Take the result of a search; return the outputs that may be sent now."""
        running = self._running_of(result)
        if running is None:
            return []
        return self._settle(running, running.answer.take_result(result, seeds, now_ms))

    def record_written(self, record: Retrieved, now_ms: int) -> list[Output]:
        """Note that a record is in the log; return the outputs that may be sent now."""
        running = self._running_of(record)
        return (
            []
            if running is None
            else self._settle(running, running.answer.record_written(record, now_ms))
        )

    def _running_of(self, record: Retrieved) -> _Running | None:
        return self._answers.get(f"{record.request_id}.{record.attempt}")

    @property
    def alarm_ms(self) -> int | None:
        """Return when `wake` must be called next; None if no search is late soon."""
        alarms = (running.answer.alarm_ms for running in self._answers.values())
        return min((alarm for alarm in alarms if alarm is not None), default=None)

    def wake(self, now_ms: int) -> list[Output]:
        """Give up searches that are late; return the outputs that may be sent now."""
        ready_outputs: list[Output] = []
        for running in list(self._answers.values()):
            ready_outputs += self._settle(running, running.answer.wake(now_ms))
        return ready_outputs

    def _settle(self, running: _Running, ready_outputs: list[Output]) -> list[Output]:
        if ready_outputs and ready_outputs[-1].finish_reason and running.base_id in self._answers:
            self._forget(running)
        return ready_outputs
