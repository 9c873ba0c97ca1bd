"""The files that ARCHITECTURE.md names for a request's way through a worker are those that run."""

from tests.request_path import named_files, recorded_files
from tests.waits import until
from tests.workers.fakes import work
from tests.workers.running_worker import running_worker

# They run too, and hand nothing on: a check, and the rows of a frame.
BESIDE = {"workers/llm/frames.py", "workers/llm/peers.py"}
LOOPS = "workers/loops.py"  # also runs for what the worker does beside requests, as its neighbours
JOB = "workers/llm/engine.py"  # a dataclass, and the protocol of engines: no code that runs
ENGINE = "workers/llm/vllm/engine.py"  # replaced by the test's engine


async def test_page_names_worker_files_in_call_order() -> None:
    async with running_worker() as worker:
        with recorded_files("workers/llm", until=lambda: worker.engine.jobs) as files:
            await worker.submit(work())
            await until(lambda: worker.engine.jobs != [])
    first, *named, last = named_files("workers")
    assert (first, last) == (LOOPS, ENGINE) and JOB in named
    named.remove(JOB)
    assert named == [name for name in files if name in named]
    assert files.keys() - set(named) <= BESIDE
