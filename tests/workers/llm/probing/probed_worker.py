"""A worker with one answer that searches, by plain calls."""

from collections.abc import Sequence
from typing import Any

from schemas.records import (
    Passage,
    Sampling,
    StreamEnd,
    TokenFrame,
)
from tests.workers.fakes import out
from tests.workers.llm.probing.probes import passage, probes, search_result
from tests.workers.llm.worker_in_memory import DECODE, NOW_MS, WorkerInMemory
from workers.llm.engine import Job

PROMPT = [1, 2, 3]
A, B = passage("a"), passage("b", 710, 711, 712)


class Probed(WorkerInMemory):
    """A worker with one answer that searches; its engine says tokens 10, 11, … one by one."""

    def __init__(
        self, wishes: dict[str, Any] | None = None, model_len: int = 0, **changes: Any
    ) -> None:
        super().__init__(model_len=model_len)
        self.now_ms = NOW_MS
        self.sent_frames: list[TokenFrame] = []
        changes.setdefault("sampling", Sampling(max_tokens=40))
        self.work("r1", DECODE, probes=probes(**(wishes or {})), **changes)

    @property
    def job(self) -> Job:
        return self.engine.jobs[-1]

    def say(self, *token_ids: int, text: str = "", after_ms: int = 10, **fields: Any) -> None:
        """The present job says these, one an output; each as a letter unless told otherwise."""
        for place, token in enumerate(token_ids):
            self.now_ms += after_ms
            last = fields if place == len(token_ids) - 1 else {}
            output = out(self.job.request_id, [token], text or chr(87 + token), **last)
            self.step(output, now_ms=self.now_ms)

    def find(
        self, *passages: Passage, after_ms: int = 0, seeds: Sequence[str] = (), **fields: Any
    ) -> None:
        self.now_ms += after_ms
        record = search_result(self.asks[-1], *passages, **fields)
        self.requests.step(self.probing.take_result(record, seeds, self.now_ms), self.now_ms)

    def write(self, after_ms: int = 0) -> None:
        """The last record is in the log."""
        self.now_ms += after_ms
        self.requests.step(self.probing.record_written(self.records[-1], self.now_ms), self.now_ms)

    def wake(self, after_ms: int) -> None:
        self.now_ms += after_ms
        self.requests.step(self.probing.wake(self.now_ms), self.now_ms)

    def sent_answer(self) -> tuple[list[int], str]:
        """What has left so far."""
        self.sent_frames += [batch.frame for batch in self.frames.take(self.now_ms)]
        frames = self.sent_frames
        tokens = [token for frame in frames for token in frame.token_ids]
        return tokens, "".join(text for frame in frames for text in frame.texts)

    def stream_end(self) -> StreamEnd:
        self.sent_answer()
        (end,) = [end for frame in self.sent_frames for end in frame.ends]
        return end
