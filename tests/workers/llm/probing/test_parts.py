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


def test_insertion_leaves_model_length_for_rest_of_answer() -> None:
    worker = Probed(model_len=3 + 40 + 4)
    worker.say(10, 11)
    worker.find(B, A)  # five tokens with what stands around them, and four
    worker.say(12, 13)
    assert worker.records[0].passages == (A,)
    longest = len(worker.job.prompt_tokens) + worker.job.sampling.max_tokens
    assert longest == 3 + 40 + 4


@pytest.mark.parametrize("is_inserted", [True, False])
def test_answer_offers_kv_to_next_turn_unless_passages_were_inserted(
    is_inserted: bool,
) -> None:
    worker = Probed()
    worker.say(10, 11)
    worker.find(*[A] * is_inserted)
    worker.say(12, 13)
    worker.write()
    worker.say(14, finish_reason="stop", kv=handle(NOW_MS + 999))
    (batch,) = worker.frames.take(NOW_MS)
    (outcome, _) = batch.reports[-1]
    assert (outcome.kv is None) == is_inserted
    assert worker.engine.aborted[1:] == ["r1.1+2"] * is_inserted  # what was kept is freed


def test_first_job_fetches_kv_and_next_job_has_all_tokens() -> None:
    worker = Probed(kv=handle(NOW_MS + 9_000, "w0"), first_seq=1, first_char=1)
    first = worker.job
    assert first.kv is not None and first.request_id == "r1.1"
    worker.say(10)
    assert worker.sent_answer()[0] == []  # prefill has sent it; it waits for more
    worker.say(11)
    worker.find(A)
    worker.say(12, 13)
    assert worker.job.kv is None and not worker.job.is_paired
    worker.write()
    assert worker.sent_answer()[0] == [10, 11, 12, 13]


def replayed(
    insertions: Sequence[tuple[int, Sequence[int]]], decided: int, **wishes: Any
) -> Probed:
    inserts = [Insert(at=at, tokens=pack_tokens(ids)) for at, ids in insertions]
    return Probed({"inserts": inserts, "decided": decided, **wishes}, attempt=2)


def test_later_attempt_repeats_insertions_without_searching() -> None:
    worker = replayed([(4, [901, 700, 903]), (8, [901, 710, 903])], 2)
    assert worker.job.sampling.max_tokens == 4
    worker.say(10, 11, 12, 13, finish_reason="length")
    assert list(worker.job.prompt_tokens) == [*PROMPT, 10, 11, 12, 13, 901, 700, 903]
    assert worker.job.sampling.max_tokens == 4
    worker.say(14, 15, 16, 17, finish_reason="length")
    assert worker.job.sampling.max_tokens == 32
    assert not worker.asks
    assert worker.sent_answer()[0] == [10, 11, 12, 13, 14, 15, 16, 17]
    worker.say(18, 19)
    assert worker.asks[0].probe == 3
    worker.find(A)
    worker.say(20, 21)
    assert (worker.records[0].seq, worker.records[0].attempt) == (12, 2)
    worker.write()
    worker.say(22, finish_reason="stop")
    end = worker.stream_end()
    assert (end.probes, end.retrieved_tokens, end.seq) == (3, 3 + 3 + 4, 13)
    assert end.kind is OutcomeKind.COMPLETED


def test_later_attempt_skips_probes_that_inserted_nothing() -> None:
    worker = replayed([(4, [901, 700, 903]), (8, [])], 2)
    worker.say(10, 11, 12, 13, finish_reason="length")
    worker.say(14, 15, 16, 17)
    assert not worker.asks and len(worker.engine.jobs) == 2
    worker.say(18, 19)
    assert worker.asks[0].probe == 3


def test_replay_ends_answer_at_or_before_insertion_place() -> None:
    worker = replayed([(4, [901, 700, 903])], 1)
    worker.say(10, 11, finish_reason="stop")
    assert worker.stream_end().seq == 2
    whole = Probed(
        {"inserts": [Insert(at=4, tokens=pack_tokens([700]))], "decided": 1},
        sampling=Sampling(max_tokens=4),
    )
    whole.say(10, 11, 12, 13, finish_reason="length")
    assert whole.stream_end().finish_reason == "length"


def test_next_job_samples_with_remaining_limits() -> None:
    sampling = Sampling(max_tokens=20, min_tokens=6, seed=3, logprobs=1)
    worker = Probed(sampling=sampling)
    worker.say(10, 11)
    worker.find(A)
    worker.say(12, 13)
    later = worker.job.sampling
    assert (later.max_tokens, later.min_tokens, later.seed, later.logprobs) == (16, 2, 3, 1)
