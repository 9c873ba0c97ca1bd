"""A worker whose answers search while they are generated, with a log in memory."""

from typing import Any

from schemas.errors import DeadlineExceeded, UnknownCollection
from schemas.records import (
    Load,
    Outcome,
    Passage,
    Retrieved,
    Sampling,
    TokenFrame,
    WarmPrefix,
    WorkPhase,
)
from schemas.rules.tokens import pack_tokens
from streams.log.clock import wall_ms
from streams.log.retrieval.results import Hit, RetrievalResult
from tests.virtual_time import virtual
from tests.waits import until
from tests.workers.fakes import EPOCH, MODEL, WORKER, out, work
from tests.workers.llm.probing.probes import LEAD, TRAIL, passage, probes
from tests.workers.running_worker import RunningWorker, running_worker
from workers.llm.engine import EngineLoad

A = passage("a")


def pool_finds(*passages: Passage, **changes: Any) -> RetrievalResult:
    hits = tuple(Hit(hit_passage.passage_id, 0.5, passage=hit_passage) for hit_passage in passages)
    fields: dict[str, Any] = {
        "retrieval_id": "x",
        "shards": 2,
        "missing": {},
        "exact": True,
        "seeds": ("s1",),
        "extends": 7,
        "distances_computed": 99,
        "took_ms": 3.0,
        "mode": "hybrid",
    }
    return RetrievalResult(hits=hits, **{**fields, **changes})


def searching(**wishes: Any) -> Any:
    return work("r1", probes=probes(**wishes), sampling=Sampling(max_tokens=40))


async def say(worker: RunningWorker, *token_ids: int, **last_fields: Any) -> None:
    """Let the present job output these tokens, one per step."""
    for place, token in enumerate(token_ids):
        last = last_fields if place == len(token_ids) - 1 else {}
        worker.engine.say(out(worker.engine.jobs[-1].request_id, [token], chr(87 + token), **last))
        await until(lambda: worker.engine.is_heard)


def sent_tokens(worker: RunningWorker) -> list[int]:
    return [token for frame in worker.log.of(TokenFrame) for token in frame.token_ids]


async def test_worker_leases_hits_only_for_probing_answers() -> None:
    async with running_worker() as worker:
        await worker.submit(work("r0"))
        assert "hits" not in worker.membership.leases
        await worker.submit(searching())
        await until(lambda: worker.log.retrieval_clients != [])
        assert worker.membership.leases["hits"] == 3
    assert not worker.log.retrieval_clients


async def test_probing_answer_resumes_after_phase_is_acknowledged() -> None:
    async with running_worker() as worker:
        worker.log.search_result = pool_finds(A, missing={1: DeadlineExceeded("late").to_wire()})
        worker.log.held_acks["phases"] = []
        await worker.submit(searching(min_score=0.25))
        await until(lambda: worker.log.retrieval_clients != [])
        await say(worker, 10, 11)
        await until(lambda: worker.log.searches != [])
        text, fields = worker.log.searches[0]
        assert text == "Which pier? ab"
        expected = {"collection": "handbook", "kind": "decode", "tenant": "blue", "min_score": 0.25}
        assert {name: fields[name] for name in expected} == expected
        assert (fields["wants_seeds"], fields["request_id"]) == (True, "r1")
        await say(worker, 12, 13)
        await until(lambda: worker.log.held_acks["phases"] != [])
        await say(worker, 14)
        (entry,) = (entry for entry in worker.log.sends if entry[0] == "phases")
        _, partition, key, record, _ = entry
        producer = worker.process._clients.durable
        assert (key, partition) == ("s-r1", producer.session_partition("s-r1"))
        assert (record.router_id, record.attempt, record.probe, record.seq) == (WORKER, 1, 1, 4)
        assert record.tokens == pack_tokens([*LEAD, 700, 701, *TRAIL])
        assert (record.missing, record.extends, record.mode) == ((1,), 7, "hybrid")
        assert sent_tokens(worker) == [10, 11, 12, 13]
        worker.log.held_acks["phases"][0].set_result(None)
        await until(lambda: sent_tokens(worker) == [10, 11, 12, 13, 14])
        frames = worker.log.of(TokenFrame)
        (notice,) = [retrieved for frame in frames for retrieved in frame.retrieved]
        assert (notice.probe, notice.citations[0].passage_id) == (1, "a#0")
        await say(worker, 15, finish_reason="stop")
        await until(lambda: worker.log.of(Outcome) != [])
        (outcome,) = worker.log.of(Outcome)
        assert (outcome.probes, outcome.retrieved_tokens, outcome.completion_tokens) == (1, 4, 6)
        load: Load = worker.membership.load_source()
        assert load.stalled_share is not None


async def test_probing_answer_resumes_without_free_hits_partition() -> None:
    async with running_worker() as worker:
        worker.log.full.add("hits")
        await worker.submit(searching())
        await say(worker, 10, 11, 12, 13, 14)
        await until(lambda: sent_tokens(worker) == [10, 11, 12, 13, 14])
        (record,) = worker.log.of(Retrieved)
        assert record.error is not None and "no partition of hits" in record.error.message
        assert len(worker.engine.jobs) == 1


async def test_probe_phase_reports_search_error() -> None:
    async with running_worker() as worker:
        worker.log.search_result = UnknownCollection("handbook: no such collection")
        await worker.submit(searching())
        await until(lambda: worker.log.retrieval_clients != [])
        await say(worker, 10, 11, 12, 13, 14)
        await until(lambda: sent_tokens(worker) == [10, 11, 12, 13, 14])
        assert worker.log.of(Retrieved)[0].error.code == UnknownCollection.code


@virtual
async def test_unanswered_probe_stalls_no_longer_than_limit() -> None:
    async with running_worker() as worker:
        worker.log.is_silent = True
        await worker.submit(searching(stall_ms=150))
        await until(lambda: worker.log.retrieval_clients != [])
        await say(worker, 10, 11, 12, 13)
        before_ms = wall_ms()
        await say(worker, 14)
        await until(lambda: sent_tokens(worker) == [10, 11, 12, 13, 14])
        assert 150 <= wall_ms() - before_ms <= 250
        assert worker.log.of(Retrieved)[0].error.code == DeadlineExceeded.code
        await say(worker, 15, finish_reason="stop")
        await until(lambda: worker.log.of(Outcome) != [])
        assert 100 <= worker.log.of(Outcome)[0].stalled_ms <= 250


def prefix(**changes: Any) -> WarmPrefix:
    fields: dict[str, Any] = {
        "request_id": "r9",
        "session_id": "s-r9",
        "worker_id": WORKER,
        "worker_epoch": EPOCH,
        "model": MODEL,
        "prompt_tokens": pack_tokens([1, 2, 3]),
        "deadline_ms": wall_ms() + 5_000,
    }
    return WarmPrefix(**{**fields, **changes})


async def test_warm_prefix_runs_as_job_without_outcome() -> None:
    async with running_worker() as worker:
        for topic in ("prefill", "decode"):
            worker.log.readers[topic].put(prefix(request_id=topic))
        await until(lambda: len(worker.engine.jobs) == 2)
        assert {job.request_id for job in worker.engine.jobs} == {"warm.prefill", "warm.decode"}
        job = worker.engine.jobs[0]
        assert (list(job.prompt_tokens), job.phase) == ([1, 2, 3], WorkPhase.DECODE)
        assert (job.sampling.max_tokens, job.kv) == (1, None)
        worker.engine.say(out("warm.decode", [5], "x", finish_reason="length"))
        await until(lambda: worker.engine.is_heard)
        assert (worker.log.of(TokenFrame), worker.log.of(Outcome)) == ([], [])


async def test_warm_prefix_is_skipped_when_stale_or_engine_is_busy() -> None:
    async with running_worker() as worker:
        orders = [
            prefix(worker_epoch=EPOCH - 1),
            prefix(worker_id="w2"),
            prefix(model="other"),
            prefix(adapter="ada"),
            prefix(deadline_ms=wall_ms() - 1),
        ]
        for order in orders:
            worker.decode.put(order)
        await worker.submit(work("r1"))  # read behind them
        worker.engine.figures = EngineLoad(waiting=1)
        worker.decode.put(prefix())
        await worker.submit(work("r2"))
        worker.engine.figures = EngineLoad(running=4)
        worker.decode.put(prefix())
        await worker.submit(work("r3"))
        assert [job.request_id for job in worker.engine.jobs] == ["r1.1", "r2.1", "r3.1"]


async def test_unreadable_warm_prefix_is_dead_lettered() -> None:
    async with running_worker() as worker:
        worker.decode.put(prefix(prompt_tokens=b"abc"))
        await until(lambda: worker.log.dead_letters != [])
        assert worker.engine.jobs == []
