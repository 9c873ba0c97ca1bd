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
from tests.workers.llm.probing.probes import JOINT, LEAD, TRAIL, found, passage
from tests.workers.llm.worker_in_memory import DECODE, NOW_MS, WorkerInMemory


def test_a_probe_is_asked_before_its_place_with_the_question_and_the_answer_so_far() -> None:
    worker = Probed()
    worker.say(10)
    assert not worker.asks
    worker.say(11)
    (ask,) = worker.asks
    assert (ask.probe, ask.seq, ask.text, ask.k, ask.seeds) == (1, 2, "Which pier? ab", 1, ())
    assert ask.work.probes is not None and ask.work.probes.tenant == "blue"
    assert ask.deadline_ms == worker.now_ms + 2 * 10 + 100  # two tokens at their pace, and a stall


def test_what_was_found_in_time_goes_in_at_its_place_and_nothing_waits_but_for_the_log() -> None:
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
    assert worker.said() == ([10, 11, 12, 13], "abcd")
    worker.write()
    assert worker.said() == ([10, 11, 12, 13, 14], "abcde")


def test_its_reader_hears_of_it_once_before_any_later_token() -> None:
    worker = Probed()
    worker.say(10, 11)
    worker.find(A, missing=(1,))
    worker.say(12, 13, 14)
    worker.said()
    assert not any(frame.retrieved for frame in worker.frames_said)
    worker.write()
    worker.write()
    worker.said()
    (told,) = [each for frame in worker.frames_said for each in frame.retrieved]
    assert (told.request_id, told.collection, told.probe, told.seq) == ("r1", "handbook", 1, 4)
    assert (told.tokens, told.missing_shards) == (4, 1)
    (citation,) = told.citations
    assert (citation.passage_id, citation.content) == ("a#0", "hash of a")
    assert (citation.seq, citation.probe) == (4, 1)
    (frame,) = [frame for frame in worker.frames_said if 14 in frame.token_ids]
    assert frame.retrieved or worker.frames_said.index(frame) > 0


def test_what_the_engine_says_beyond_the_place_is_dropped_if_passages_come() -> None:
    worker = Probed()
    worker.say(10, 11, 12, 13, 14, 15)
    assert worker.said()[0] == [10, 11, 12, 13]
    worker.find(A, after_ms=5)
    assert list(worker.job.prompt_tokens) == [*PROMPT, 10, 11, 12, 13, *LEAD, 700, 701, *TRAIL]
    assert worker.records[0].stalled_ms == 15  # token 14 was there, 15 ms ago
    worker.write()
    worker.say(20, after_ms=25)
    assert worker.said()[0] == [10, 11, 12, 13, 20]
    worker.say(21, finish_reason="stop")
    end = worker.last_word()
    assert (end.probes, end.retrieved_tokens, end.stalled_ms) == (1, 4, 40.0)


@pytest.mark.parametrize("error", [None, NotReady("nobody")])
def test_where_nothing_new_is_found_the_engine_goes_on(error: NotReady | None) -> None:
    worker = Probed({"known": ("a#0",)})
    worker.say(10, 11, 12, 13, 14)
    wire = None if error is None else error.to_wire()
    worker.find(A, error=wire)
    (record,) = worker.records
    assert (record.seq, record.tokens, record.passages, record.error) == (4, b"", (), wire)
    assert worker.said()[0] == [10, 11, 12, 13]
    worker.write(after_ms=7)
    assert worker.said()[0] == [10, 11, 12, 13, 14]
    assert (len(worker.engine.jobs), worker.engine.aborted) == (1, [])
    worker.say(15, finish_reason="stop")
    end = worker.last_word()
    assert (end.probes, end.retrieved_tokens, end.stalled_ms) == (1, 0, 7.0)


def test_nothing_found_before_the_place_holds_nothing_up() -> None:
    worker = Probed()
    worker.say(10, 11)
    worker.find()
    assert worker.records[0].seq == 4
    worker.say(12, 13)
    assert worker.said()[0] == [10, 11, 12, 13], "all before the place"
    worker.write()
    worker.say(14)
    assert worker.said()[0] == [10, 11, 12, 13, 14]
    worker.say(15, finish_reason="stop")
    assert worker.last_word().stalled_ms == 0


def test_decoding_waits_at_the_place_for_so_long_and_then_goes_on_without() -> None:
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
    assert worker.said()[0] == [10, 11, 12, 13, 14, 15]
    assert len(worker.engine.jobs) == 1 and worker.probing.alarm_ms is None


def test_an_answer_to_an_earlier_search_is_none_to_this_one() -> None:
    worker = Probed()
    worker.say(10, 11, 12, 13)
    late = found(worker.asks[0], A)
    worker.wake(100)
    worker.write()
    worker.say(14, 15)
    assert worker.asks[1].probe == 2
    worker.held.step(worker.probing.take_result(late, (), worker.now_ms), worker.now_ms)
    worker.say(16, 17, 18)
    assert len(worker.records) == 1 and len(worker.engine.jobs) == 1


def test_what_a_job_says_that_was_given_up_is_dropped() -> None:
    worker = Probed()
    worker.say(10, 11)
    worker.find(A)
    worker.say(12, 13)
    worker.write()
    worker.step(out("r1.1", [98], "x"), out("r1.1", finish_reason="abort"))
    worker.say(14)
    assert worker.said() == ([10, 11, 12, 13, 14], "abcde")


def test_an_end_without_tokens_waits_for_the_log_too() -> None:
    worker = Probed()
    worker.say(10, 11)
    worker.find()
    worker.step(out("r1.1", finish_reason="stop"), now_ms=worker.now_ms)
    assert len(worker.held) == 1
    worker.write()
    assert worker.last_word().probes == 1


def test_without_lookahead_decoding_waits_for_every_search() -> None:
    worker = Probed({"lookahead": 0})
    worker.say(10, 11, 12, 13, 14)
    assert worker.asks[0].seq == 4
    assert worker.said()[0] == [10, 11, 12, 13]
    worker.find(A)
    assert worker.records[0].seq == 4


def test_a_probe_starts_where_the_one_before_ended_and_asks_for_what_is_new() -> None:
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


def test_cold_probes_have_no_seeds() -> None:
    worker = Probed({"is_warm": False})
    worker.say(10, 11)
    worker.find(seeds=("x",))
    worker.write()
    worker.say(12, 13, 14, 15)
    assert [ask.seeds for ask in worker.asks] == [(), ()]


def test_whole_passages_go_in_as_far_as_they_may() -> None:
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


def test_so_many_probes_at_most_and_none_that_the_end_would_overtake() -> None:
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


def test_a_character_is_not_cut() -> None:
    """The place is put off until the text has all of the tokens."""
    worker = Probed()
    worker.say(10, 11)
    worker.find(A)
    worker.step(out(worker.job.request_id, [12, 13], ""), now_ms=worker.now_ms)
    assert not worker.records
    worker.say(14, text="é")
    assert worker.records[0].seq == 5
    assert worker.said() == ([10, 11, 12, 13, 14], "abé")


def test_stop_strings_are_found_across_what_was_put_in() -> None:
    worker = Probed(sampling=Sampling(max_tokens=40, stop=("de",)))
    assert worker.job.sampling.stop == ()
    worker.say(10, 11)
    worker.find(A)
    worker.say(12, 13)  # "d" may begin it
    worker.write()
    assert worker.said() == ([10, 11, 12, 13], "abc")
    worker.say(14)
    assert worker.said() == ([10, 11, 12, 13, 14], "abc")
    end = worker.last_word()
    assert (end.kind, end.finish_reason, end.stop_reason) == (OutcomeKind.COMPLETED, "stop", "de")
    assert (end.seq, end.chars) == (5, 3)
    assert worker.engine.aborted[-1] == worker.job.request_id
    assert not len(worker.held) and not len(worker.probing)


def test_text_held_back_for_a_stop_string_comes_with_the_end() -> None:
    worker = Probed(sampling=Sampling(max_tokens=40, stop=("bx",), min_tokens=1))
    worker.say(10, 11, finish_reason="stop")
    assert worker.said() == ([10, 11], "ab")


def test_an_end_during_a_wait_counts_if_nothing_is_put_in() -> None:
    worker = Probed()
    worker.say(10, 11, 12, 13)
    worker.say(14, finish_reason="stop")
    assert len(worker.held) == 1
    worker.find()
    assert len(worker.held) == 1
    worker.write()
    assert worker.last_word().seq == 5
    assert not len(worker.held) and not len(worker.probing)


def test_an_end_during_a_wait_is_dropped_if_something_is_put_in() -> None:
    worker = Probed()
    worker.say(10, 11, 12, 13)
    worker.say(14, finish_reason="stop", kv=handle(NOW_MS + 999))
    worker.find(A)
    assert worker.engine.aborted == ["r1.1"]  # which also frees the KV that was kept of it
    worker.write()
    worker.say(20, finish_reason="stop")
    assert worker.said()[0] == [10, 11, 12, 13, 20]


@pytest.mark.parametrize("phase", ["asked", "waiting", "unwritten", "going on"])
@pytest.mark.parametrize("how", ["cancel", "expire", "give back", "abandon", "higher attempt"])
def test_it_may_end_in_every_phase_of_a_probe(phase: str, how: str) -> None:
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
            worker.held.cancel(cancel_work(), worker.now_ms)
        case "expire":
            worker.held.expire(NOW_MS + 60_000)
        case "give back":
            worker.held.give_back(NotReady("over").to_wire(), worker.now_ms)
        case "abandon":
            worker.held.abandon()
        case _:
            worker.work("r1", DECODE, attempt=2)
    assert job.request_id in worker.engine.aborted
    assert not len(worker.probing) and worker.probing.alarm_ms is None
    if worker.records:
        worker.write()
    worker.find(A)
    worker.step(out(job.request_id, finish_reason="abort"))
    assert len(worker.held) == (how == "higher attempt")
    if how == "give back":
        assert [phase.kind for phase in worker.phases] == [PhaseKind.FAILED]


def test_an_error_of_the_engine_is_not_held_back() -> None:
    worker = Probed()
    worker.say(10, 11, 12, 13, 14)
    error = NotReady("gone").to_wire()
    worker.step(out("r1.1", finish_reason="error", error=error))
    assert [phase.kind for phase in worker.phases] == [PhaseKind.FAILED]
    assert not len(worker.probing)


def test_logprobs_are_taken_for_the_trigger_and_given_to_those_who_asked() -> None:
    logprob = [TokenLogprob(token_id=10, token="a", logprob=-3.0)]
    worker = Probed({"trigger": "uncertain", "lookahead": 1})
    assert worker.job.sampling.logprobs == 0
    for token in range(10, 17):
        worker.say(token, logprobs=logprob)
    assert worker.asks[0].seq == 6
    worker.find(A)
    assert worker.records[0].seq == 7
    worker.said()
    assert not any(frame.logprobs for frame in worker.frames_said)
    asking = Probed({"trigger": "uncertain"}, sampling=Sampling(max_tokens=40, logprobs=2))
    assert asking.job.sampling.logprobs == 2
    asking.say(10, logprobs=logprob)
    asking.said()
    assert asking.frames_said[0].logprobs


def test_other_answers_pass_untouched() -> None:
    worker = Probed()
    worker.work("r2", DECODE)
    worker.say(10)
    worker.step(out("r2.1", [5, 6, 7, 8, 9], "vwxyz"))
    assert worker.said() == ([10, 5, 6, 7, 8, 9], "avwxyz")
    assert worker.job.work is None


def test_work_is_the_same_for_one_who_does_not_search() -> None:
    order: Work = work("r1", DECODE, NOW_MS)
    worker = WorkerInMemory()
    worker.take(order)
    assert worker.engine.jobs[0].work is None and not len(worker.probing)
