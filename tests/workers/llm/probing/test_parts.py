"""The engine jobs of an answer that searches, one after the other."""

from collections.abc import Sequence
from typing import Any

import pytest

from schemas.records import (
    Insert,
    OutcomeKind,
    Sampling,
)
from schemas.rules.tokens import pack_tokens
from tests.workers.fakes import handle
from tests.workers.llm.probing.probed_worker import PROMPT, A, B, Probed
from tests.workers.llm.worker_in_memory import NOW_MS


def test_the_models_length_is_kept_with_room_for_the_rest_of_the_answer() -> None:
    worker = Probed(model_len=3 + 40 + 4)
    worker.say(10, 11)
    worker.find(B, A)  # five tokens with what stands around them, and four
    worker.say(12, 13)
    assert worker.records[0].passages == (A,)
    longest = len(worker.job.prompt_tokens) + worker.job.sampling.max_tokens
    assert longest == 3 + 40 + 4


@pytest.mark.parametrize("is_put_in", [True, False])
def test_kv_is_offered_to_the_next_turn_only_of_an_answer_without_insertions(
    is_put_in: bool,
) -> None:
    worker = Probed()
    worker.say(10, 11)
    worker.find(*[A] * is_put_in)
    worker.say(12, 13)
    worker.write()
    worker.say(14, finish_reason="stop", kv=handle(NOW_MS + 999))
    (batch,) = worker.frames.take(NOW_MS)
    (outcome, _) = batch.reports[-1]
    assert (outcome.kv is None) == is_put_in
    assert worker.engine.aborted[1:] == ["r1.1+2"] * is_put_in  # what was kept is freed


def test_the_first_job_fetches_kv_and_the_next_has_all_tokens_here() -> None:
    worker = Probed(kv=handle(NOW_MS + 9_000, "w0"), first_seq=1, first_char=1)
    first = worker.job
    assert first.kv is not None and first.request_id == "r1.1"
    worker.say(10)
    assert worker.said()[0] == []  # prefill has sent it; it waits for more
    worker.say(11)
    worker.find(A)
    worker.say(12, 13)
    assert worker.job.kv is None and not worker.job.is_paired
    worker.write()
    assert worker.said()[0] == [10, 11, 12, 13]


def replayed(put_in: Sequence[tuple[int, Sequence[int]]], decided: int, **wishes: Any) -> Probed:
    inserts = [Insert(at=at, tokens=pack_tokens(ids)) for at, ids in put_in]
    return Probed({"inserts": inserts, "decided": decided, **wishes}, attempt=2)


def test_a_later_attempt_puts_the_same_in_at_the_same_places_without_asking() -> None:
    worker = replayed([(4, [901, 700, 903]), (8, [901, 710, 903])], 2)
    assert worker.job.sampling.max_tokens == 4
    worker.say(10, 11, 12, 13, finish_reason="length")
    assert list(worker.job.prompt_tokens) == [*PROMPT, 10, 11, 12, 13, 901, 700, 903]
    assert worker.job.sampling.max_tokens == 4
    worker.say(14, 15, 16, 17, finish_reason="length")
    assert worker.job.sampling.max_tokens == 32
    assert not worker.asks
    assert worker.said()[0] == [10, 11, 12, 13, 14, 15, 16, 17]
    worker.say(18, 19)
    assert worker.asks[0].probe == 3
    worker.find(A)
    worker.say(20, 21)
    assert (worker.records[0].seq, worker.records[0].attempt) == (12, 2)
    worker.write()
    worker.say(22, finish_reason="stop")
    end = worker.last_word()
    assert (end.probes, end.retrieved_tokens, end.seq) == (3, 3 + 3 + 4, 13)
    assert end.kind is OutcomeKind.COMPLETED


def test_probes_that_put_nothing_in_are_not_asked_again() -> None:
    worker = replayed([(4, [901, 700, 903]), (8, [])], 2)
    worker.say(10, 11, 12, 13, finish_reason="length")
    worker.say(14, 15, 16, 17)
    assert not worker.asks and len(worker.engine.jobs) == 2
    worker.say(18, 19)
    assert worker.asks[0].probe == 3


def test_an_answer_that_ends_where_something_was_put_in_is_over() -> None:
    worker = replayed([(4, [901, 700, 903])], 1)
    worker.say(10, 11, finish_reason="stop")
    assert worker.last_word().seq == 2
    whole = Probed(
        {"inserts": [Insert(at=4, tokens=pack_tokens([700]))], "decided": 1},
        sampling=Sampling(max_tokens=4),
    )
    whole.say(10, 11, 12, 13, finish_reason="length")
    assert whole.last_word().finish_reason == "length"


def test_the_sampling_of_further_jobs_is_what_is_left() -> None:
    sampling = Sampling(max_tokens=20, min_tokens=6, seed=3, logprobs=1)
    worker = Probed(sampling=sampling)
    worker.say(10, 11)
    worker.find(A)
    worker.say(12, 13)
    later = worker.job.sampling
    assert (later.max_tokens, later.min_tokens, later.seed, later.logprobs) == (16, 2, 3, 1)
