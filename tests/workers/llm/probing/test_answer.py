"""Answers that search while they are generated, by plain calls."""

import pytest

from schemas.errors import NotReady
from schemas.records import (
    OutcomeKind,
    PhaseKind,
    Sampling,
    TokenLogprob,
    Work,
)
from schemas.rules.tokens import pack_tokens
from tests.workers.fakes import cancel_work, handle, out, work
from tests.workers.llm.probing.probed_worker import PROMPT, A, B, Probed
from tests.workers.llm.probing.probes import JOINT, LEAD, TRAIL, passage, search_result
from tests.workers.llm.worker_in_memory import DECODE, NOW_MS, WorkerInMemory


def test_probe_asks_ahead_of_its_place_with_question_and_answer() -> None:
    worker = Probed()
    worker.say(10)
    assert not worker.asks
    worker.say(11)
    (ask,) = worker.asks
    assert (ask.probe, ask.seq, ask.text, ask.k, ask.seeds) == (1, 2, "Which pier? ab", 1, ())
    assert ask.work.probes is not None and ask.work.probes.tenant == "blue"
    assert ask.deadline_ms == worker.now_ms + 2 * 10 + 100  # two tokens at their pace, and a stall


def test_passages_enter_at_their_place_and_later_tokens_wait_for_log() -> None:
    worker = Probed()
    worker.say(10, 11)
    worker.find(A)
    assert not worker.records  # its place is two tokens ahead
    worker.say(12, 13)
    (record,) = worker.records
    assert (record.attempt, record.probe, record.seq) == (1, 1, 4)
    assert record.tokens == pack_tokens([*LEAD, 700, 701, *TRAIL])
    assert (record.passages, record.error) == ((A,), None)
    first, second = worker.engine.jobs
    assert worker.engine.aborted == [first.request_id]
    assert list(second.prompt_tokens) == [*PROMPT, 10, 11, 12, 13, *LEAD, 700, 701, *TRAIL]
    assert second.sampling.max_tokens == 36
    worker.say(14)  # of the new job
    assert worker.sent_answer() == ([10, 11, 12, 13], "abcd")
    worker.write()
    assert worker.sent_answer() == ([10, 11, 12, 13, 14], "abcde")


def test_stream_reports_retrieval_once_before_later_tokens() -> None:
    worker = Probed()
    worker.say(10, 11)
    worker.find(A, missing=(1,))
    worker.say(12, 13, 14)
    worker.sent_answer()
    assert not any(frame.retrieved for frame in worker.sent_frames)
    worker.write()
    worker.write()
    worker.sent_answer()
    (notice,) = [notice for frame in worker.sent_frames for notice in frame.retrieved]
    assert (notice.request_id, notice.collection, notice.probe, notice.seq) == (
        "r1",
        "handbook",
        1,
        4,
    )
    assert (notice.tokens, notice.missing_shards) == (4, 1)
    (citation,) = notice.citations
    assert (citation.passage_id, citation.content) == ("a#0", "hash of a")
    assert (citation.seq, citation.probe) == (4, 1)
    (frame,) = [frame for frame in worker.sent_frames if 14 in frame.token_ids]
    assert frame.retrieved or worker.sent_frames.index(frame) > 0


def test_insertion_drops_tokens_generated_beyond_its_place() -> None:
    worker = Probed()
    worker.say(10, 11, 12, 13, 14, 15)
    assert worker.sent_answer()[0] == [10, 11, 12, 13]
    worker.find(A, after_ms=5)
    assert list(worker.job.prompt_tokens) == [*PROMPT, 10, 11, 12, 13, *LEAD, 700, 701, *TRAIL]
    assert worker.records[0].stalled_ms == 15  # token 14 was there, 15 ms ago
    worker.write()
    worker.say(20, after_ms=25)
    assert worker.sent_answer()[0] == [10, 11, 12, 13, 20]
    worker.say(21, finish_reason="stop")
    end = worker.stream_end()
    assert (end.probes, end.retrieved_tokens, end.stalled_ms) == (1, 4, 40.0)


@pytest.mark.parametrize("error", [None, NotReady("nobody")])
def test_answer_continues_same_job_if_search_finds_nothing_new(error: NotReady | None) -> None:
    worker = Probed({"known_passages": ("a#0",)})
    worker.say(10, 11, 12, 13, 14)
    wire = None if error is None else error.to_wire()
    worker.find(A, error=wire)
    (record,) = worker.records
    assert (record.seq, record.tokens, record.passages, record.error) == (4, b"", (), wire)
    assert worker.sent_answer()[0] == [10, 11, 12, 13]
    worker.write(after_ms=7)
    assert worker.sent_answer()[0] == [10, 11, 12, 13, 14]
    assert (len(worker.engine.jobs), worker.engine.aborted) == (1, [])
    worker.say(15, finish_reason="stop")
    end = worker.stream_end()
    assert (end.probes, end.retrieved_tokens, end.stalled_ms) == (1, 0, 7.0)


def test_early_empty_search_does_not_stall_answer() -> None:
    worker = Probed()
    worker.say(10, 11)
    worker.find()
    assert worker.records[0].seq == 4
    worker.say(12, 13)
    assert worker.sent_answer()[0] == [10, 11, 12, 13], "all before the place"
    worker.write()
    worker.say(14)
    assert worker.sent_answer()[0] == [10, 11, 12, 13, 14]
    worker.say(15, finish_reason="stop")
    assert worker.stream_end().stalled_ms == 0


def test_decoding_waits_for_search_until_stall_limit_then_continues() -> None:
    worker = Probed()
    worker.say(10, 11, 12, 13, 14)
    assert worker.probing.alarm_ms == worker.now_ms - 10 + 100
    worker.wake(80)
    assert not worker.records
    worker.wake(10)
    (record,) = worker.records
    assert record.error is not None and "100 ms" in record.error.message
    assert (record.error.code, record.seq) == ("deadline_exceeded", 4)
    worker.find(A)  # too late
    worker.write()
    worker.say(15)
    assert worker.sent_answer()[0] == [10, 11, 12, 13, 14, 15]
    assert len(worker.engine.jobs) == 1 and worker.probing.alarm_ms is None


def test_probe_ignores_late_result_of_earlier_probe() -> None:
    worker = Probed()
    worker.say(10, 11, 12, 13)
    late = search_result(worker.asks[0], A)
    worker.wake(100)
    worker.write()
    worker.say(14, 15)
    assert worker.asks[1].probe == 2
    worker.requests.step(worker.probing.take_result(late, (), worker.now_ms), worker.now_ms)
    worker.say(16, 17, 18)
    assert len(worker.records) == 1 and len(worker.engine.jobs) == 1


def test_answer_drops_outputs_of_aborted_job() -> None:
    worker = Probed()
    worker.say(10, 11)
    worker.find(A)
    worker.say(12, 13)
    worker.write()
    worker.step(out("r1.1", [98], "x"), out("r1.1", finish_reason="abort"))
    worker.say(14)
    assert worker.sent_answer() == ([10, 11, 12, 13, 14], "abcde")


def test_answer_end_without_tokens_waits_for_log() -> None:
    worker = Probed()
    worker.say(10, 11)
    worker.find()
    worker.step(out("r1.1", finish_reason="stop"), now_ms=worker.now_ms)
    assert len(worker.requests) == 1
    worker.write()
    assert worker.stream_end().probes == 1


def test_decoding_waits_for_every_search_without_lookahead() -> None:
    worker = Probed({"lookahead": 0})
    worker.say(10, 11, 12, 13, 14)
    assert worker.asks[0].seq == 4
    assert worker.sent_answer()[0] == [10, 11, 12, 13]
    worker.find(A)
    assert worker.records[0].seq == 4


def test_probe_starts_from_previous_seeds_and_asks_for_new_passages() -> None:
    worker = Probed()
    worker.say(10, 11)
    worker.find(A, seeds=("x", "y"))
    worker.say(12, 13)
    worker.write()
    worker.say(14, 15)
    assert (worker.asks[1].probe, worker.asks[1].seeds, worker.asks[1].k) == (2, ("x", "y"), 2)
    worker.find(A, B)
    worker.say(16, 17)
    assert worker.records[1].passages == (B,)
    assert worker.records[1].seq == 8


def test_cold_probe_has_no_seeds() -> None:
    worker = Probed({"is_warm": False})
    worker.say(10, 11)
    worker.find(seeds=("x",))
    worker.write()
    worker.say(12, 13, 14, 15)
    assert [ask.seeds for ask in worker.asks] == [(), ()]


def test_insertion_takes_whole_passages_within_token_limit() -> None:
    worker = Probed({"k": 2, "tokens_max": 5})
    worker.say(10, 11)
    worker.find(A, passage("long", *range(720, 724)), B)
    worker.say(12, 13)
    record = worker.records[0]
    assert record.passages == (A, B)
    assert record.tokens == pack_tokens([*LEAD, 700, 701, *JOINT, 710, 711, 712, *TRAIL])
    worker.write()
    worker.say(14, 15, 16, 17)
    assert len(worker.asks) == 1  # no room for more


def test_answer_limits_probes_and_skips_those_beyond_its_end() -> None:
    worker = Probed({"probes_max": 2}, sampling=Sampling(max_tokens=40))
    for _ in range(12):
        worker.say(10)
        if worker.asks and len(worker.records) < len(worker.asks):
            worker.find()
            worker.write()
    assert len(worker.asks) == 2
    short = Probed(sampling=Sampling(max_tokens=4))
    short.say(10, 11, 12)
    assert not short.asks


def test_insertion_waits_for_complete_character() -> None:
    """The insertion waits until the text covers all tokens."""
    worker = Probed()
    worker.say(10, 11)
    worker.find(A)
    worker.step(out(worker.job.request_id, [12, 13], ""), now_ms=worker.now_ms)
    assert not worker.records
    worker.say(14, text="é")
    assert worker.records[0].seq == 5
    assert worker.sent_answer() == ([10, 11, 12, 13, 14], "abé")


def test_stop_string_matches_across_insertion() -> None:
    worker = Probed(sampling=Sampling(max_tokens=40, stop=("de",)))
    assert worker.job.sampling.stop == ()
    worker.say(10, 11)
    worker.find(A)
    worker.say(12, 13)  # "d" may begin it
    worker.write()
    assert worker.sent_answer() == ([10, 11, 12, 13], "abc")
    worker.say(14)
    assert worker.sent_answer() == ([10, 11, 12, 13, 14], "abc")
    end = worker.stream_end()
    assert (end.kind, end.finish_reason, end.stop_reason) == (OutcomeKind.COMPLETED, "stop", "de")
    assert (end.seq, end.chars) == (5, 3)
    assert worker.engine.aborted[-1] == worker.job.request_id
    assert not len(worker.requests) and not len(worker.probing)


def test_answer_end_flushes_text_withheld_for_stop_string() -> None:
    worker = Probed(sampling=Sampling(max_tokens=40, stop=("bx",), min_tokens=1))
    worker.say(10, 11, finish_reason="stop")
    assert worker.sent_answer() == ([10, 11], "ab")


def test_answer_ends_after_wait_if_search_finds_nothing() -> None:
    worker = Probed()
    worker.say(10, 11, 12, 13)
    worker.say(14, finish_reason="stop")
    assert len(worker.requests) == 1
    worker.find()
    assert len(worker.requests) == 1
    worker.write()
    assert worker.stream_end().seq == 5
    assert not len(worker.requests) and not len(worker.probing)


def test_insertion_drops_end_reached_during_wait() -> None:
    worker = Probed()
    worker.say(10, 11, 12, 13)
    worker.say(14, finish_reason="stop", kv=handle(NOW_MS + 999))
    worker.find(A)
    assert worker.engine.aborted == ["r1.1"]  # which also frees the KV that was kept of it
    worker.write()
    worker.say(20, finish_reason="stop")
    assert worker.sent_answer()[0] == [10, 11, 12, 13, 20]


@pytest.mark.parametrize("phase", ["asked", "waiting", "unwritten", "going on"])
@pytest.mark.parametrize("how", ["cancel", "expire", "give back", "abandon", "higher attempt"])
def test_answer_may_end_in_every_phase_of_probe(phase: str, how: str) -> None:
    worker = Probed()
    worker.say(10, 11)
    if phase != "asked":
        worker.say(12, 13, 14)
    if phase in ("unwritten", "going on"):
        worker.find(A)
    if phase == "going on":
        worker.write()
        worker.say(20)
    job = worker.job
    match how:
        case "cancel":
            worker.requests.cancel(cancel_work(), worker.now_ms)
        case "expire":
            worker.requests.expire(NOW_MS + 60_000)
        case "give back":
            worker.requests.give_back(NotReady("over").to_wire(), worker.now_ms)
        case "abandon":
            worker.requests.abandon()
        case _:
            worker.work("r1", DECODE, attempt=2)
    assert job.request_id in worker.engine.aborted
    assert not len(worker.probing) and worker.probing.alarm_ms is None
    if worker.records:
        worker.write()
    worker.find(A)
    worker.step(out(job.request_id, finish_reason="abort"))
    assert len(worker.requests) == (how == "higher attempt")
    if how == "give back":
        assert [phase.kind for phase in worker.phases] == [PhaseKind.FAILED]


def test_engine_error_ends_answer_during_wait() -> None:
    worker = Probed()
    worker.say(10, 11, 12, 13, 14)
    error = NotReady("gone").to_wire()
    worker.step(out("r1.1", finish_reason="error", error=error))
    assert [phase.kind for phase in worker.phases] == [PhaseKind.FAILED]
    assert not len(worker.probing)


def test_trigger_gets_logprobs_and_client_only_on_request() -> None:
    logprob = [TokenLogprob(token_id=10, token="a", logprob=-3.0)]
    worker = Probed({"trigger": "uncertain", "lookahead": 1})
    assert worker.job.sampling.logprobs == 0
    for token in range(10, 17):
        worker.say(token, logprobs=logprob)
    assert worker.asks[0].seq == 6
    worker.find(A)
    assert worker.records[0].seq == 7
    worker.sent_answer()
    assert not any(frame.logprobs for frame in worker.sent_frames)
    asking = Probed({"trigger": "uncertain"}, sampling=Sampling(max_tokens=40, logprobs=2))
    assert asking.job.sampling.logprobs == 2
    asking.say(10, logprobs=logprob)
    asking.sent_answer()
    assert asking.sent_frames[0].logprobs


def test_answer_without_probes_passes_unchanged() -> None:
    worker = Probed()
    worker.work("r2", DECODE)
    worker.say(10)
    worker.step(out("r2.1", [5, 6, 7, 8, 9], "vwxyz"))
    assert worker.sent_answer() == ([10, 5, 6, 7, 8, 9], "avwxyz")
    assert worker.job.work is None


def test_work_without_probes_gives_engine_plain_job() -> None:
    order: Work = work("r1", DECODE, NOW_MS)
    worker = WorkerInMemory()
    worker.take(order)
    assert worker.engine.jobs[0].work is None and not len(worker.probing)
