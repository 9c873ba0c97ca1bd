"""One answer that searches while it is generated: decides which outputs leave and what to do. Pure.

Theory of operation. The engine continues while a search is under way. When the insertion point is
reached, further outputs wait here until the search has ended, or for `stall_ms`. Any result is
written to the log as a `Retrieved`, and no token at or after the insertion point leaves before the
log has it. So a later attempt inserts the same tokens at the same positions, and generates the
answer that readers have. If nothing new was found, the engine was never interrupted. Otherwise its
job is aborted, and a new job continues with all tokens so far and the passages; the prefix cache
lacks only the passages. An insertion point is the end of an output whose text has all of its
tokens, so that no character is cut. Stop strings are matched here, because an answer may span
several jobs. Insertions of earlier attempts need no search: a job ends at each of them.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from schemas.errors import DeadlineExceeded
from schemas.frozen import frozen
from schemas.records import (
    Passage,
    Retrieved,
    WireError,
    Work,
)
from schemas.rules.citations import probe_notice
from schemas.rules.sizes import PASSAGES_MAX, PROBES_MAX
from schemas.rules.tokens import token_count
from workers.llm.engine import Job, Output, ProbeTotals
from workers.llm.pieces import split
from workers.llm.probing.parts import Parts
from workers.llm.probing.passages import around_tokens, choose_passages, insert_tokens
from workers.llm.probing.triggers import LAST_TOKENS, TriggerInput, trigger_of
from workers.llm.stop_strings import StopText

TEXT_CHARS = 200  # characters of the answer in the search text


@frozen
class ProbeAsk:
    """A search for an answer, to be started."""

    work: Work
    probe: int
    seq: int  # tokens of the answer when the search starts
    text: str
    k: int
    seeds: Sequence[str]
    asked_ms: int
    deadline_ms: int


class Actions(Protocol):
    """The actions that an answer requests of its owner."""

    def ask(self, ask: ProbeAsk) -> None:
        """Start a search in the retrieval pool."""

    def write(self, record: Retrieved) -> None:
        """Write a record to the log; `ProbedAnswer.record_written` follows."""

    def go_on(self, job: Job) -> None:
        """Abort the current job, and start this one."""

    def stop(self) -> None:
        """Abort the current job, and free the KV that was kept of it."""

    def texts(self, before: Sequence[int], output: Output) -> Sequence[str]:
        """Return what each token of an output adds to the text."""


class ProbedAnswer:
    """An answer that searches. After `begin`, each method takes an event and returns the outputs
    that may be sent, under the first job's id."""

    def __init__(self, job: Job, model_len: int, actions: Actions) -> None:
        """Create one; `model_len` is the model's token limit, 0: none."""
        assert job.work is not None and job.work.probes is not None
        self._probes, self._work = job.work.probes, job.work
        probing = self._probes.retrieval.probing
        assert probing is not None
        self.alarm_ms: int | None = None  # when to call `wake`
        self._probing, self._whole, self._actions = probing, job, actions
        self._trigger = trigger_of(probing)
        wants_logprobs = self._trigger.wants_logprobs
        self._parts = Parts(job, self._probes.inserts, model_len, wants_logprobs=wants_logprobs)
        self._text = ""  # the end of the answer's text
        self._logprobs: deque[float] = deque(maxlen=LAST_TOKENS)
        stops = job.sampling.stop
        self._stops = StopText(stops, include_stop=job.sampling.include_stop) if stops else None
        self._passage_ids = set(self._probes.known_passages)
        before = [insert.tokens for insert in self._probes.inserts if insert.tokens]
        around = len(before) * around_tokens(probing)
        self._tokens_left = probing.tokens_max - sum(map(token_count, before)) + around
        self._seeds: Sequence[str] = ()
        self._ask: ProbeAsk | None = None  # a search that is under way, or waits for its point
        self._result: Retrieved | None = None  # the result of that search
        self._reached_ms: int | None = None  # when its insertion point was reached
        self._record: Retrieved | None = None  # the record that is not in the log yet
        self._waiting: deque[tuple[Output, int]] = deque()  # outputs with their times, in ms
        self._decided = self._probes.decided
        # the last probe's insertion point, from which the next one counts
        self._last = max((insert.at for insert in self._probes.inserts), default=0)
        self._first_ms = self._left_ms = 0  # when the first and the last token left
        self._due_ms = math.inf  # when the next token could have been generated
        self._stalled_ms = 0.0
        self._has_news = self._decided > 0  # there are totals that were not sent

    @property
    def stalled_ms(self) -> float:
        """Return how many ms decoding was stalled so far."""
        return self._stalled_ms

    def begin(self) -> Job:
        """Return the job that begins the answer."""
        return self._parts.next_job()

    def take(self, output: Output, now_ms: int) -> list[Output]:
        """Take an output of the current job; return the outputs that may be sent now."""
        if output.finish_reason in ("abort", "error"):  # waiting outputs are dropped
            return [replace(output, request_id=self._whole.request_id)]
        self._waiting += [(part, now_ms) for part in self._split(output)]
        return self._leave(now_ms)

    def take_result(self, result: Retrieved, seeds: Sequence[str], now_ms: int) -> list[Output]:
        """Take the result of a search; return the outputs that may be sent now."""
        if self._ask is None or self._result is not None or result.probe != self._ask.probe:
            return []
        self._result = result
        self._seeds = seeds if self._probing.is_warm else ()
        if self._reached_ms is not None or not self._new_passages(result)[0]:
            self._decide(result, now_ms)
        return self._leave(now_ms)

    def wake(self, now_ms: int) -> list[Output]:
        """Give up a search that is late; return the outputs that may be sent now."""
        if self.alarm_ms is None or now_ms < self.alarm_ms or self._ask is None:
            return []
        late = DeadlineExceeded(
            f"{self._work.request_id}: probe {self._ask.probe} found nothing in time; decoding "
            f"waited {self._probing.stall_ms} ms"
        )
        return self.take_result(failed_result(self._ask, late.to_wire(), now_ms), (), now_ms)

    def record_written(self, record: Retrieved, now_ms: int) -> list[Output]:
        """Note that the record is in the log; return the outputs that may be sent now."""
        if self._record is None or record.probe != self._record.probe:
            return []
        self._record, ready_outputs = None, []
        if record.tokens:
            news = replace(
                self._totals(), notice=probe_notice(record, self._probes.retrieval.collection)
            )
            ready_outputs.append(Output(request_id=self._whole.request_id, probe_totals=news))
        return ready_outputs + self._leave(now_ms)

    # Outputs that leave

    def _split(self, output: Output) -> list[Output]:
        """Split an output by token: insertion points must not depend on the engine's batching."""
        if len(output.token_ids) < 2:
            return [output]
        before = [*self._parts.answer]
        for waiting, _ in self._waiting:
            before += waiting.token_ids
        return split(output, self._actions.texts(before, output))

    def _leave(self, now_ms: int) -> list[Output]:
        ready_outputs: list[Output] = []
        while self._waiting and not self._is_held(self._waiting[0][0]):
            output, made_ms = self._waiting.popleft()
            since_ms = max(min(self._due_ms, made_ms), self._left_ms)
            if output.token_ids and now_ms > since_ms:
                self._stalled_ms += 0 if ready_outputs else now_ms - since_ms
                self._has_news = True
            ready_outputs.append(self._emit(output, now_ms))
            if ready_outputs[-1].finish_reason:
                self._waiting.clear()
            elif output.finish_reason:
                self._parts.insert_due()
                self._has_news = True
                self._actions.go_on(self._parts.next_job())
            else:
                self._look(output, now_ms)
        return ready_outputs

    def _is_held(self, output: Output) -> bool:
        if self._reached_ms is not None:
            return True
        beyond = self._parts.seq + len(output.token_ids)
        return self._record is not None and (
            beyond > self._record.seq or bool(output.finish_reason)
        )

    def _emit(self, output: Output, now_ms: int) -> Output:
        ids, sampling = output.token_ids, self._whole.sampling
        if ids:
            self._first_ms, self._left_ms = self._first_ms or now_ms, now_ms
            self._due_ms = math.inf
        self._parts.extend(ids)
        self._text = (self._text + output.text)[-TEXT_CHARS:]
        self._logprobs.extend(token.logprob for token in output.logprobs)
        text, finish, stop_reason = output.text, output.finish_reason, output.stop_reason
        if self._parts.is_over(finish):
            finish = ""
        if self._stops is not None:
            text = self._stops.feed(text, may_stop=self._parts.seq > sampling.min_tokens)
            if self._stops.matched_stop:
                finish, stop_reason = "stop", self._stops.matched_stop
            elif finish:
                text += self._stops.flush()
        keeps_kv = (
            bool(finish) and finish == output.finish_reason and not self._parts.inserted_tokens
        )
        if finish and not keeps_kv:  # the next turn's prompt lacks the insertions
            self._actions.stop()
        news, self._has_news = self._totals() if self._has_news else None, False
        return replace(
            output,
            request_id=self._whole.request_id,
            text=text,
            logprobs=() if sampling.logprobs is None else output.logprobs,
            finish_reason=finish,
            stop_reason=stop_reason if finish else "",
            kv=output.kv if keeps_kv or not output.finish_reason else None,
            probe_totals=news,
        )

    def _totals(self) -> ProbeTotals:
        return ProbeTotals(
            probes=self._decided,
            retrieved_tokens=self._parts.inserted_tokens,
            stalled_ms=self._stalled_ms,
        )

    # Searches and their insertion points

    def _look(self, output: Output, now_ms: int) -> None:
        """Start a search if it is due, and check whether its insertion point is reached."""
        if self._parts.is_repeating or self._record is not None:
            return
        if self._ask is None and self._may_ask() and self._trigger.asks(self._progress()):
            self._begin_search(now_ms)
        if self._ask is not None and output.text and self._trigger.is_place(self._progress()):
            self._reached_ms = now_ms
            if self._result is None:
                self.alarm_ms = now_ms + self._probing.stall_ms
            else:
                self._decide(self._result, now_ms)

    def _progress(self) -> TriggerInput:
        return TriggerInput(
            tokens=self._parts.seq - self._last,
            asked_tokens=0 if self._ask is None else self._parts.seq - self._ask.seq,
            text=self._text,
            logprobs=tuple(self._logprobs),
        )

    def _may_ask(self) -> bool:
        probing = self._probing
        has_room = self._tokens_left > 0 and self._parts.insert_space() > around_tokens(probing)
        is_last = self._decided >= min(probing.probes_max, PROBES_MAX)
        return has_room and not is_last and probing.lookahead < self._parts.tokens_left

    def _begin_search(self, now_ms: int) -> None:
        probing, query = self._probing, self._probes.retrieval.query
        ahead_ms = probing.lookahead * self._pace_ms()
        by_ms = now_ms + math.ceil(ahead_ms) + max(1, probing.stall_ms)
        self._result = None
        self._ask = ProbeAsk(
            work=self._work,
            probe=self._decided + 1,
            seq=self._parts.seq,
            text=f"{query} {self._text}".strip(),
            k=min(probing.k + len(self._passage_ids), PASSAGES_MAX),
            seeds=self._seeds,
            asked_ms=now_ms,
            deadline_ms=min(by_ms, self._work.deadline_ms),
        )
        self._actions.ask(self._ask)

    def _pace_ms(self) -> float:
        """Return the mean time between two tokens so far, in ms."""
        busy_ms = self._left_ms - self._first_ms - self._stalled_ms
        return max(0.0, busy_ms / (self._parts.seq - 1)) if self._parts.seq > 1 else 0.0

    def _new_passages(self, result: Retrieved) -> tuple[tuple[Passage, ...], int]:
        """Return the passages to insert, and the number of new ones left out."""
        if result.error is not None:
            return (), 0
        return choose_passages(
            *(self._probing, result.passages, self._passage_ids),
            reserved=self._probes.retrieval.reserved,
            tokens_max=self._tokens_left,
            space_tokens=self._parts.insert_space(),
        )

    def _decide(self, result: Retrieved, now_ms: int) -> None:
        """Write the record of a search, and continue with its passages, if there are any."""
        ask, is_reached = self._ask, self._reached_ms is not None
        assert ask is not None
        passages, left_out = self._new_passages(result)
        due_ms = float(now_ms)
        if self._waiting:
            due_ms = self._waiting[0][1]
        elif self._reached_ms is not None and passages:
            due_ms = self._reached_ms + self._pace_ms()
        self._record = record = replace(
            result,
            attempt=self._work.attempt,
            seq=self._parts.seq
            if is_reached
            else max(self._parts.seq, ask.seq + self._probing.lookahead),
            tokens=insert_tokens(self._probing, passages),
            passages=passages,
            left_out=result.left_out + left_out,
            stalled_ms=max(0.0, now_ms - due_ms),
            at_ms=now_ms,
        )
        self._decided, self._last, self._has_news = ask.probe, record.seq, True
        self._ask = self._result = self._reached_ms = self.alarm_ms = None
        if passages:
            self._passage_ids.update(passage.passage_id for passage in passages)
            self._tokens_left -= sum(token_count(passage.tokens) for passage in passages)
            self._waiting.clear()
            self._due_ms = due_ms
            self._parts.insert(record.tokens)
            self._actions.go_on(self._parts.next_job())
        self._actions.write(record)


def failed_result(ask: ProbeAsk, error: WireError, now_ms: int) -> Retrieved:
    """Return the record of a failed search, with its error."""
    return Retrieved(
        request_id=ask.work.request_id,
        session_id=ask.work.session_id,
        router_id=ask.work.worker_id,
        error=error,
        asked_ms=ask.asked_ms,
        at_ms=now_ms,
        attempt=ask.work.attempt,
        probe=ask.probe,
    )
