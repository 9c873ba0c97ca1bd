"""Patches vLLM in every process that vLLM starts (entry point `vllm.general_plugins`).

Theory of operation. Each patch, with the problem without it on one small machine:
- NIXL's progress thread spins on a core: vLLM's agent sets no delay (`calm_nixl`).
- While blocks wait for a peer, the engine steps a thousand times a second (`calm_waiting`).
- Workers spin for a second after every step before they sleep (`calm_queues`).
- NIXL's start pins every worker to the machine's last core, despite its settings (`keep_binding`).
- Engine processes outlive a killed parent, and take seconds to exit (`watch`, `exit_quickly`).
- Engines take CPU time from the process that keeps the lease, and from the broker (`give_way`).
- A prompt with a seed that takes several steps ends a CPU engine (`keep_draws`).
- Blocks are allocated in the order in which they became free, mostly backwards, so neighbours are
  read one by one (`sort_blocks`).
- A form, a penalty or bad words begin anew where an answer continues (`keep_prior_state`).
- On CPUs, requests without an adapter beside one that has one use an adapter (`spare_plain_rows`).
- Each process imports all of vLLM, 10 CPU seconds (`fork_children`, if this one was forked).
The first two and the last five are always applied, the others if `workers/llm/vllm/launch.py`
sets their environment variables. A patch whose target this vLLM lacks is skipped and logged.
"""

import atexit
import contextlib
import functools
import importlib
import logging
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from workers import forks
from workers.llm.vllm.continued import state
from workers.llm.vllm.preload import BIND_VARIABLE

OWNER_VARIABLE = "TRIVIUM_PLUGIN_OWNER_PID"
NICE_VARIABLE = "TRIVIUM_PLUGIN_NICE"
SPIN_VARIABLE = "TRIVIUM_PLUGIN_SPIN_MS"
# The longest sleep of the progress thread. Events wake it; this bounds the delay after a lost
# wake-up, which NIXL's own code expects of some UCX transports. 10 ms costs 0.5 % of a core.
PROGRESS_SLEEP_US = 10_000
# Poll interval of an engine that has only pinned blocks.
PINNED_POLL_S = 0.1
# Poll interval of an engine that waits for a peer's KV, as a share of its wait so far.
AWAITED_POLL_SHARE, AWAITED_POLL_MAX_S = 0.05, 0.01
# A reader of a queue sleeps for STEP_NAP_S at a time until STEP_S after its last read. Then it
# waits for a share of its wait so far, at most NAP_MAX_MS, before it polls again.
STEP_S, STEP_NAP_S = 0.02, 0.000_05
NAP_SHARE, NAP_MAX_MS = 0.25, 100

log = logging.getLogger(__name__)


def register() -> None:
    """Apply the patches; vLLM calls it in each process, perhaps more than once."""
    owner = os.environ.get(OWNER_VARIABLE, "")
    if owner.isdecimal() and int(owner) != os.getpid():
        watch(int(owner))
        exit_quickly()
        give_way(int(os.environ.get(NICE_VARIABLE, "0")))
    for mend in (
        *(_calm_nixl_when_loaded, calm_waiting, calm_queues, keep_binding),
        *(sort_blocks, keep_draws, keep_prior_state, spare_plain_rows, fork_children),
    ):
        try:
            mend()
        except (AttributeError, ImportError):
            log.warning("this vLLM cannot be mended by %s", mend.__name__)


def give_way(nice: int) -> None:
    """Lower the priority of all current threads, and so of all that they start, to `nice`.

    Linux has priorities per thread. A priority that is already lower stays.
    """
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has just ended
            present = os.getpriority(os.PRIO_PROCESS, int(thread))
            os.setpriority(os.PRIO_PROCESS, int(thread), max(nice, present))


def calm_nixl(api: ModuleType, sleep_us: int = PROGRESS_SLEEP_US) -> None:
    """Let the progress threads of agents from `nixl._api` sleep in poll(2) until UCX has an event.

    Passive transfers keep working, which they would not without the thread. Agents that set a
    delay keep it.
    """
    bindings = api.nixlBind
    make_agent = bindings.nixlAgent
    if getattr(make_agent, "calm", False):
        return

    def make_calm_agent(name: str, config: Any) -> Any:
        if config.useProgThread and not config.pthrDelay:
            config.pthrDelay = sleep_us
        return make_agent(name, config)

    make_calm_agent.calm = True  # type: ignore[attr-defined]  # marks the replacement
    bindings.nixlAgent = make_calm_agent


def _calm_nixl_when_loaded() -> None:
    """Apply `calm_nixl` when vLLM loads NIXL: loading is slow, and most processes never do it."""
    from vllm.distributed import nixl_utils

    load = nixl_utils._load_nixl_attr  # noqa: SLF001  # the one place where it is loaded
    if getattr(load, "calm", False):
        return

    @functools.wraps(load)
    def load_calm(name: str) -> Any:
        value = load(name)
        if name == "NixlWrapper" and value is not None:
            calm_nixl(importlib.import_module(value.__module__))
        return value

    load_calm.calm = True  # type: ignore[attr-defined]  # marks the replacement
    nixl_utils._load_nixl_attr = load_calm  # noqa: SLF001  # see above


def calm_waiting() -> None:
    """Let an engine with nothing to compute wait for input, instead of stepping every millisecond.

    It then has only blocks that are pinned for a peer, or requests that wait for a peer's KV.
    """
    from vllm.v1.engine.core import EngineCoreProc

    step = EngineCoreProc._process_engine_step  # noqa: SLF001  # there is no hook around it
    if getattr(step, "calm", False):
        return
    since_s: list[float] = []  # since when the engine waits; a process has one engine

    @functools.wraps(step)
    def step_calm(self: Any) -> bool:
        executed: bool = step(self)
        scheduler = self.scheduler
        has_work = (
            executed
            or type(self) is not EngineCoreProc  # data-parallel cores step for their peers
            or not self.is_running()
            or scheduler.finished_req_ids
            or not scheduler.has_requests()
        )
        if has_work or scheduler.running or scheduler.waiting:
            since_s.clear()
            return executed
        poll_s = PINNED_POLL_S
        if scheduler.has_unfinished_requests():  # their blocks wait for a peer's KV
            now_s = time.monotonic()
            if not since_s:
                since_s.append(now_s)
            poll_s = min((now_s - since_s[0]) * AWAITED_POLL_SHARE, AWAITED_POLL_MAX_S)
        try:
            request = self.input_queue.get(timeout=poll_s)
        except queue.Empty:
            return executed
        self._handle_client_request(*request)
        return executed

    step_calm.calm = True  # type: ignore[attr-defined]  # marks the replacement
    EngineCoreProc._process_engine_step = step_calm  # noqa: SLF001  # see above


def calm_queues() -> None:
    """Let readers of shared-memory queues sleep instead of spinning for a second after each read.

    During a step they sleep very briefly; later they wait to be woken, as vLLM does after a second.
    A wake-up is sometimes lost when messages follow each other quickly, and vLLM polls again only
    after 5 s, so these waits are short at first and grow.
    """
    spin_ms = os.environ.get(SPIN_VARIABLE, "")
    if not spin_ms:
        return
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    wait, spin_s = SpinCondition.wait, float(spin_ms) / 1_000
    if getattr(wait, "calm", False):
        return

    @functools.wraps(wait)
    def wait_calm(self: Any, timeout_ms: int | None = None) -> None:
        waited_s = time.monotonic() - self.last_read
        if spin_s < waited_s < STEP_S:
            time.sleep(STEP_NAP_S)
            return
        self.busy_loop_s = spin_s
        nap_ms = min(NAP_MAX_MS, int(waited_s * 1_000 * NAP_SHARE))
        wait(self, nap_ms if timeout_ms is None else min(nap_ms, timeout_ms))

    wait_calm.calm = True  # type: ignore[attr-defined]  # marks the replacement
    SpinCondition.wait = wait_calm


def keep_binding() -> None:
    """Keep NIXL from moving workers to the last core if cores were configured."""
    if os.environ.get(BIND_VARIABLE, "auto") == "auto":
        return
    from vllm.platforms.cpu import CpuPlatform

    assert callable(CpuPlatform.discover_numa_topology)  # only that move uses it
    CpuPlatform.discover_numa_topology = classmethod(lambda cls: [])


def sort_blocks() -> None:
    """Allocate blocks in the order of their ids, so that KV moves with fewer descriptors.

    vLLM still chooses the blocks: the least recently used ones.
    """
    from vllm.v1.core.block_pool import BlockPool

    get_new_blocks = BlockPool.get_new_blocks
    if getattr(get_new_blocks, "sorts", False):
        return

    @functools.wraps(get_new_blocks)
    def get_sorted_blocks(self: Any, num_blocks: int) -> Any:
        return sorted(get_new_blocks(self, num_blocks), key=lambda block: block.block_id)

    get_sorted_blocks.sorts = True  # type: ignore[attr-defined]  # marks the replacement
    BlockPool.get_new_blocks = get_sorted_blocks


def keep_draws() -> None:
    """Keep requests from using their random generators in steps whose token is dropped.

    vLLM would reset the generator by an offset, which generators on CPUs do not have.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    CPUModelRunner.sample_tokens = keeping_draws(CPUModelRunner.sample_tokens)


def keeping_draws(sample: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a runner's `sample_tokens`; it hides generators of requests with unfinished prompts."""
    if getattr(sample, "keeps", False):
        return sample

    @functools.wraps(sample)
    def sample_keeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch, generators = self.input_batch, dict[int, Any]()
        dropped = self.discard_request_mask.np[: batch.num_reqs]
        for row in list(batch.generators):
            if row < len(dropped) and dropped[row]:
                generators[row] = batch.generators.pop(row)
        try:
            return sample(self, *args, **kwargs)
        finally:
            batch.generators.update(generators)

    sample_keeping.keeps = True  # type: ignore[attr-defined]  # marks the replacement
    return sample_keeping


def keep_prior_state() -> None:
    """Let grammars and counts of output tokens include a continued answer's prior tokens."""
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.worker.gpu_input_batch import InputBatch

    for owner, name, wrap in (
        (StructuredOutputManager, "_create_grammar", state.feeding_prior_tokens),
        (Scheduler, "_make_cached_request_data", state.telling_prior_outputs),
        (InputBatch, "add_request", state.counting_prior_outputs),
    ):
        setattr(owner, name, wrap(getattr(owner, name)))
    NewRequestData.from_request = state.splitting_prior_outputs(NewRequestData.from_request)


def spare_plain_rows() -> None:
    """Let the adapters' products on CPUs be zero for tokens of requests without an adapter.

    These have the index -1, by which vLLM's functions for CPUs take the last adapter's weights.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
        product = sparing_plain_rows(getattr(lora_ops, name))
        for module in (lora_ops, punica_cpu):
            assert callable(getattr(module, name))
            setattr(module, name, product)


def sparing_plain_rows(product: Callable[..., None]) -> Callable[..., None]:
    """Wrap a function of inputs, weights, outputs and the rows' adapters, by index, to use zeros as
    the inputs of rows whose index is negative.
    """
    if getattr(product, "spares", False):
        return product

    @functools.wraps(product)
    def product_sparing(
        inputs: Any, weights: Any, outputs: Any, rows: Any, *rest: Any, **options: Any
    ) -> None:
        is_plain = (rows < 0).unsqueeze(1)
        product(inputs.masked_fill(is_plain, 0), weights, outputs, rows, *rest, **options)

    product_sparing.spares = True  # type: ignore[attr-defined]  # marks the replacement
    return product_sparing


def fork_children() -> None:
    """Let the fork server of this process also fork vLLM's processes."""
    if not forks.address:
        return
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    for starter in (utils, multiproc_executor):
        assert callable(starter.get_mp_context)
        starter.get_mp_context = forks.ForkContext


def watch(owner_pid: int) -> None:
    """End this process as soon as its owner has ended, for any reason."""
    if any(thread.name == "owner-watch" for thread in threading.enumerate()):
        return
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        _end()
    threading.Thread(target=_wait_and_end, args=(owner,), name="owner-watch", daemon=True).start()


def _wait_and_end(owner: int) -> None:
    poll = select.poll()
    poll.register(owner, select.POLLIN)
    poll.poll()
    _end()


def _end() -> NoReturn:
    # Only SIGKILL ends a process that waits inside a kernel or a transfer. The resource tracker
    # ends a little later and removes shared memory.
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("survived SIGKILL")


def exit_quickly() -> None:
    """Skip the interpreter's own teardown, 2 s per process, after vLLM's."""

    def leave() -> None:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    # It runs last: exit handlers run in reverse order, and this one is registered early.
    atexit.unregister(leave)
    atexit.register(leave)
