"""How many prompts of prefill work an engine has at once, by plain calls."""

from schemas.errors import WorkerRefused
from streams.log.clock import wall_ms
from tests.virtual_time import run_virtual
from tests.waits import until
from tests.workers.fakes import cancel_work, out, work
from tests.workers.llm.engines import job, prompt, start_sim
from tests.workers.llm.worker_in_memory import DECODE, NOW_MS, PREFILL, WorkerInMemory
from tests.workers.running_worker import running_worker
from workers.llm.active_requests import PrefillGate


def engine_job_ids(worker: WorkerInMemory) -> list[str]:
    """What the engine was given so far."""
    return [job.request_id for job in worker.engine.jobs]


def test_gate_starts_next_prompt_at_first_token_of_previous() -> None:
    """Decode jobs never wait at the gate."""
    worker = WorkerInMemory(8, at_once=1)
    for name in ("r1", "r2", "r3"):
        worker.work(name, PREFILL)
    worker.work("r4", DECODE)
    assert engine_job_ids(worker) == ["r1.1", "r4.1"]
    assert (len(worker.requests.prefill_gate), worker.requests.prefill_gate.tokens) == (2, 6)
    worker.step(out("r4.1", [5]))
    assert engine_job_ids(worker) == ["r1.1", "r4.1"]
    worker.step(out("r1.1", [5]))  # its KV may wait for a peer; the engine need not
    assert engine_job_ids(worker) == ["r1.1", "r4.1", "r2.1"]
    worker.step(out("r2.1", [5]), out("r1.1", [], finish_reason="error"))
    assert engine_job_ids(worker) == ["r1.1", "r4.1", "r2.1", "r3.1"]


def test_gate_drops_waiting_jobs_on_cancellation_and_give_back() -> None:
    worker = WorkerInMemory(8, at_once=1)
    for name in ("r1", "r2", "r3"):
        worker.work(name, PREFILL)
    worker.requests.cancel(cancel_work("r2"), NOW_MS)
    worker.requests.cancel(cancel_work("r1"), NOW_MS)
    assert engine_job_ids(worker) == ["r1.1", "r3.1"]
    worker.work("r5", PREFILL)
    worker.requests.give_back(WorkerRefused("over").to_wire(), NOW_MS)
    assert engine_job_ids(worker) == ["r1.1", "r3.1"] and not worker.requests.prefill_gate


async def test_worker_applies_gate_setting_and_counts_waiting_as_load() -> None:
    """Routers read the waiting prompts from the reported load."""
    async with running_worker(prefill_running_max=1) as worker:
        for name in ("r1", "r2", "r3"):
            worker.log.readers["prefill"].put(work(name, PREFILL))
        assert worker.process._engine is not None
        load = worker.membership.load_source
        await until(lambda: load().waiting == 2)
        assert [job.request_id for job in worker.engine.jobs] == ["r1.1"]
        assert (
            load().queued_tokens == worker.engine.load().queued_tokens + 2 * 3
        )  # tokens of a prompt


def test_gate_serializes_prefills_of_parallel_engine() -> None:
    async def main() -> None:
        engine = await start_sim(prefill_base_ms=10, prefill_running_max=8)
        gate, began_ms = PrefillGate(engine.add, 1), wall_ms()
        times: list[int] = []
        for salt in range(3):
            gate.add(job(prompt(20, salt), PREFILL))
        while len(times) < 3:
            for output in await engine.outputs():
                times.append(round(wall_ms() - began_ms))
                gate.release(output.request_id)
        assert times == [10, 20, 30]
        await engine.close()

    run_virtual(main())
