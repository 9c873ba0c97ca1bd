"""Turns the tokens that `batch.py` samples into outputs, and ends answers.

An answer ends at its limit, at the end of sequence, or at a stop. Rows at one of these, and rows
with a `Writer`, are inspected one by one; all others cost almost nothing. Pure.
"""

from dataclasses import replace

from schemas.records import WorkPhase
from workers.llm.engine import Output
from workers.llm.sim.arena import KvArena
from workers.llm.sim.batch import RunningBatch
from workers.llm.sim.blocks import BlockManager
from workers.llm.sim.run import SimRun
from workers.llm.sim.settings import SimSettings
from workers.llm.sim.vocabulary import Vocabulary


class RunningAnswers:
    """All running answers; each `step` samples a token for each of them."""

    def __init__(
        self, settings: SimSettings, blocks: BlockManager, arena: KvArena, vocabulary: Vocabulary
    ) -> None:
        self._vocabulary = vocabulary
        self._writers = 0  # number of rows with a writer, mostly 0
        self._batch: RunningBatch[SimRun] = RunningBatch(
            settings.running_max + settings.prefill_running_max,
            blocks,
            arena,
            token_ids=[token[0] for token in vocabulary.ids],
            end_every_tokens=settings.end_every_tokens,
        )

    def __len__(self) -> int:
        return len(self._batch)

    def begin(self, run: SimRun) -> Output:
        """Add a run to the batch, and sample its first token from the KV of its blocks."""
        self._batch.join(run)
        self._writers += run.writer is not None
        outputs, _ = self._advance(len(self._batch) - 1)
        return replace(
            outputs[0],
            kv_bytes=run.kv_bytes,
            transfer_ms=run.transfer_ms,
            kv_missed=run.kv_missed,
        )

    def step(self) -> tuple[list[Output], list[SimRun]]:
        """Sample a token for every row; return the outputs, and the runs that ended and left."""
        return self._advance(0)

    def leave(self, run: SimRun) -> None:
        """Remove a run before its end."""
        self._remove(self._batch.rows.index(run))

    def _advance(self, first: int) -> tuple[list[Output], list[SimRun]]:
        draws = self._batch.step(first)
        rows = self._batch.rows[first:] if first else self._batch.rows
        ids, texts = self._vocabulary.ids, self._vocabulary.texts
        outputs = [
            Output(
                request_id=run.request_id,
                token_ids=ids[pick],
                text=texts[pick],
                cached_tokens=run.cached_tokens,
            )
            for run, pick in zip(rows, draws.picks, strict=True)
        ]
        care = set(draws.due)
        if self._writers:
            care.update(i + first for i, run in enumerate(rows) if run.writer is not None)
        finished_rows: list[int] = []
        for i in care:
            at = i - first
            output = self._inspect(i, draws.picks[at], int(draws.raw[at]), outputs[at])
            outputs[at] = output
            if output.finish_reason:
                finished_rows.append(i)
        self._batch.settle([i for i in draws.due if self._goes_on(i, outputs[i - first])])
        runs = [self._batch.rows[i] for i in finished_rows]
        for i in sorted(finished_rows, reverse=True):
            self._remove(i)
        return outputs, runs

    def _inspect(self, i: int, pick: int, raw: int, plain: Output) -> Output:
        """Return the output of a row that reached an event or has a writer."""
        run, token_count = self._batch.rows[i], self._batch.token_count(i)
        finish, stop, text, token_ids = "", None, plain.text, plain.token_ids
        if run.writer is not None:
            text, stop = run.writer.feed(pick, token_count)
            token_ids = (run.writer.latest_token(pick, token_count)[0],)
        if stop is not None or pick == self._vocabulary.size:
            finish = "stop"
        elif token_count >= run.limit:
            finish = "stop" if run.ends_itself else "length"
        if not finish and run.writer is None:
            return plain
        if finish and run.writer is not None:
            text += run.writer.flush()
        is_end = token_ids == self._vocabulary.ids[self._vocabulary.size]
        if is_end and run.job.sampling.include_stop:
            text += self._vocabulary.special_texts[self._vocabulary.size]
        return Output(
            request_id=run.request_id,
            token_ids=token_ids,
            text=text,
            logprobs=run.writer.logprobs(pick, raw, token_count) if run.writer is not None else (),
            finish_reason=finish,
            stop_reason=stop or "",
            cached_tokens=run.cached_tokens,
        )

    def _goes_on(self, i: int, output: Output) -> bool:
        """Return whether the row's blocks take the sampled token; not those for a peer."""
        is_prefill = self._batch.rows[i].job.phase is WorkPhase.PREFILL
        return not output.finish_reason and not is_prefill

    def _remove(self, i: int) -> None:
        self._writers -= self._batch.rows[i].writer is not None
        self._batch.leave(i)
