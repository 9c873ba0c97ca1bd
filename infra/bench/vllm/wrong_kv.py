"""Gives invalid KV handles to real engines: the cases of vLLM's issue 52234, and more.

In that issue vLLM answers five cases with status 200, three of them with garbage or another
prompt's answer: an unknown request, blocks out of range, a consumed handle, a handle whose blocks
were reused, and a handle whose lease has ended. The third and fourth are tried on the engine that
consumed the handle and on another one. A valid handle of another prompt is tried as well. Each case
is a job for one decode engine: a router never writes such work, so a whole stack cannot run them.
All answers, and second answers to the same prompts from the engine's cache, are compared with those
of one engine alone. A control gives vLLM the same parameters without Trivium's checks.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from infra.bench.benchmark import counting
from infra.bench.results import Bar, at_most
from infra.stack.engine_alone import generate_answers
from infra.stack.engine_source import start_engine
from schemas.records import KvHandle, Role, Sampling, WorkPhase
from schemas.settings import ModelSettings
from streams.log.clock import wall_ms
from workers.llm.engine import Job, Output
from workers.llm.vllm.check import PREFIX_KEY, PREFIX_MARK, check_params

MODEL_LEN_MAX, PROMPT_TOKENS, TOKENS = 1_024, 130, 16
LEASE_S, MARGIN_MS = 15, 5_000
ENGINE: dict[str, Any] = {
    "kv_cache_bytes": 64 << 20,  # small, so that blocks are soon reused
    "kv_events": False,
    "kv_lease_s": LEASE_S,
    "handle_margin_ms": MARGIN_MS,
    "first_token_timeout_ms": 120_000,
    "progress_timeout_ms": 120_000,
}
CHECKED, CONTROL = "with Trivium's checks", "vLLM alone"
SAMPLING = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
FILL_TOKENS, FILLS = 900, 4  # of other prompts, to overwrite all blocks
_FAR_MS = 600_000
_OUT_OF_RANGE = 1_000_000
_SUFFIX = 9  # characters that vLLM appends to request ids
_NUMBERS = itertools.count()
Prompt = list[int]


@dataclass(slots=True)
class CaseTally:
    """Counts all, wrong and failed answers of one case, and the bytes of KV read."""

    answers: int = 0
    wrong: int = 0
    wrong_from_cache: int = 0  # of second answers, without a handle
    failed: int = 0
    read_bytes: int = 0


@dataclass(slots=True)
class Engines:
    """One prefill engine and two decode engines. `makes_prompt` draws a prompt by its tokens."""

    prefill: Any
    here: Any
    elsewhere: Any
    makes_prompt: Callable[[int], Prompt]
    tallies: dict[str, dict[str, CaseTally]] = field(default_factory=dict)

    async def handles(self, prompts: Sequence[Prompt]) -> list[KvHandle]:
        """Return a fresh handle for each prompt."""
        handles = []
        for prompt in prompts:
            (*_, last) = await ask(self.prefill, prompt, phase=WorkPhase.PREFILL)
            assert last.kv is not None, last
            handles.append(last.kv)
        return handles

    async def consumed(self, prompts: Sequence[Prompt]) -> list[KvHandle]:
        """Return handles that the engine `here` has consumed."""
        handles = []
        for prompt in prompts:
            (kv,) = await self.handles([prompt])
            await ask(self.here, prompt, kv=kv)
            handles.append(kv)
        return handles

    async def overwritten(self, prompts: Sequence[Prompt]) -> list[KvHandle]:
        """Return consumed handles whose blocks were filled for other prompts."""
        handles = await self.consumed(prompts)
        await self.overwrite()
        return handles

    async def expired(self, prompts: Sequence[Prompt]) -> list[KvHandle]:
        """Return unused handles whose lease has ended and whose blocks were refilled."""
        handles = await self.handles(prompts)
        await asyncio.sleep(LEASE_S + 1)
        await self.overwrite()
        return handles

    async def overwrite(self) -> None:
        """Compute other prompts in all blocks of the prefill engine."""
        for _ in range(FILLS):
            self.give_up(await self.handles([self.makes_prompt(FILL_TOKENS)]))

    def give_up(self, handles: Sequence[KvHandle]) -> None:
        """Let the prefill engine free the blocks of these handles."""
        for kv in handles:
            self.prefill.abort(kv.engine_request_id[:-_SUFFIX])


async def _unknown(engines: Engines, prompts: Sequence[Prompt]) -> list[KvHandle]:
    handles = await engines.handles(prompts)
    engines.give_up(handles)
    return [_with_name(kv, f"unknown-{next(_NUMBERS):08x}") for kv in handles]


async def _out_of_range(engines: Engines, prompts: Sequence[Prompt]) -> list[KvHandle]:
    return [_with_blocks(kv, _OUT_OF_RANGE) for kv in await engines.handles(prompts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCase:
    """How to make the handles of a case, and with which engine and prompt to use them."""

    make: Callable[[Engines, Sequence[Prompt]], Awaitable[list[KvHandle]]]
    is_elsewhere: bool = False
    is_foreign: bool = False


CASES = {
    "unknown request": KvCase(make=_unknown),
    "blocks out of range": KvCase(make=_out_of_range),
    "consumed, same engine": KvCase(make=Engines.consumed),
    "consumed, another engine": KvCase(make=Engines.consumed, is_elsewhere=True),
    "blocks used again, same engine": KvCase(make=Engines.overwritten),
    "blocks used again, another engine": KvCase(make=Engines.overwritten, is_elsewhere=True),
    "lease ended": KvCase(make=Engines.expired),
    "another prompt's": KvCase(make=Engines.handles, is_foreign=True),
}
Chosen = dict[tuple[str, str], list[Prompt]]  # prompts by case and guard


async def measure(
    model: str, makes_prompt: Callable[[int], Prompt], count: int
) -> dict[str, dict[str, dict[str, int]]]:
    """Try `count` prompts of each case with and without checks; return the counts by case."""
    chosen: Chosen = {
        (case, guard): [makes_prompt(PROMPT_TOKENS) for _ in range(count)]
        for case in CASES
        for guard in (CHECKED, CONTROL)
    }
    every = [prompt for several in chosen.values() for prompt in several]
    progress = counting("one engine alone", len(every))
    alone = await _start(model, "alone", 0, (Role.REPLICA,))
    try:
        inputs = [(prompt, SAMPLING) for prompt in every]
        results = await generate_answers(
            alone, inputs, at_once=1, on_answer=lambda: progress(advance=1)
        )
    finally:
        await alone.close()
    right = [answer.token_ids for answer in results]
    expected = dict(zip(map(tuple, every), right, strict=True))
    both = (Role.PREFILL, Role.DECODE)
    async with contextlib.AsyncExitStack() as opened:
        started = []
        for number, name in enumerate(("prefill", "here", "elsewhere")):
            started.append(await _start(model, name, number, both))
            opened.push_async_callback(started[-1].close)
        prefill, here, elsewhere = started
        engines = Engines(prefill, here, elsewhere, makes_prompt)
        progress = counting("wrong handles", len(every))
        for (name, guard), prompts in chosen.items():
            tally = engines.tallies.setdefault(name, {}).setdefault(guard, CaseTally())
            await _try(engines, CASES[name], guard, prompts, expected, tally)
            progress(advance=len(prompts))
    return {
        name: {guard: asdict(tally) for guard, tally in row.items()}
        for name, row in engines.tallies.items()
    }


async def _start(model: str, name: str, number: int, roles: Sequence[Role]) -> Any:
    cores = sorted(os.sched_getaffinity(0))
    return await start_engine(
        "vllm",
        {**ENGINE, "cpu_bind": str(cores[number % len(cores)])},
        model=ModelSettings(path=model, max_model_len=MODEL_LEN_MAX),
        roles=roles,
        worker_id=f"wrong-kv-{name}",
        worker_epoch=1,
    )


async def _try(
    engines: Engines, case: KvCase, guard: str, prompts: Sequence[Prompt],
    expected: dict[tuple[int, ...], list[int]], tally: CaseTally,
) -> None:  # fmt: skip
    engine = engines.elsewhere if case.is_elsewhere else engines.here
    handles = await case.make(engines, prompts)
    job_prompts = [*prompts[1:], prompts[0]] if case.is_foreign else prompts
    if guard == CONTROL:
        until_ms = wall_ms() + _FAR_MS
        handles = [dataclasses.replace(kv, expires_at_ms=until_ms) for kv in handles]
    for prompt, kv in zip(job_prompts, handles, strict=True):
        with _unchecked(engine) if guard == CONTROL else contextlib.nullcontext():
            outputs = await ask(engine, prompt, kv=kv)
        failed = outputs[-1].error is not None
        right = expected[tuple(prompt)]
        tally.answers += 1
        tally.failed += failed
        tally.wrong += not failed and token_ids(outputs) != right
        tally.read_bytes += sum(output.kv_bytes for output in outputs)
        tally.wrong_from_cache += token_ids(await ask(engine, prompt)) != right
    engines.give_up(handles)


@contextlib.contextmanager
def _unchecked(engine: Any) -> Iterator[None]:
    """Pass the parameters of handles to vLLM without Trivium's checks until the block ends."""
    receiver = engine._receiver  # noqa: SLF001  # only the control bypasses the checks
    gate, receiver.gate = receiver.gate, _Open()
    try:
        yield
    finally:
        receiver.gate = gate


class _Open:
    def use(self, kv: KvHandle, _prompt: object, _now_ms: int) -> dict[str, Any]:
        params = check_params(kv)
        return {name: params[name] for name in params.keys() - {PREFIX_KEY, PREFIX_MARK}}


async def ask(
    engine: Any, prompt: Prompt, *, kv: KvHandle | None = None, phase: WorkPhase = WorkPhase.DECODE
) -> list[Output]:
    """Run one job and return all its outputs."""
    name = f"wrong-kv-{next(_NUMBERS)}"
    engine.add(
        Job(request_id=name, phase=phase, prompt_tokens=prompt, sampling=SAMPLING,
            deadline_ms=wall_ms() + _FAR_MS, kv=kv)
    )  # fmt: skip
    outputs: list[Output] = []
    while not outputs or not outputs[-1].finish_reason:
        outputs += [output for output in await engine.outputs() if output.request_id == name]
    return outputs


def token_ids(outputs: Sequence[Output]) -> list[int]:
    """Return the token ids of all these outputs."""
    return [token for output in outputs for token in output.token_ids]


def _with_name(kv: KvHandle, name: str) -> KvHandle:
    params = json.dumps({**json.loads(kv.params), "remote_request_id": name})
    return dataclasses.replace(kv, engine_request_id=name, params=params.encode())


def _with_blocks(kv: KvHandle, first: int) -> KvHandle:
    blocks = range(first, first + len(kv.block_ids))
    params = json.dumps({**json.loads(kv.params), "remote_block_ids": [[*blocks]]})
    return dataclasses.replace(kv, block_ids=tuple(blocks), params=params.encode())


def bars(figures: dict[str, dict[str, dict[str, int]]]) -> list[Bar]:
    """Return bars on wrong answers by case; `figures` are those of `measure`."""
    return [
        at_most(f"wrong KV, {name}: wrong answers of {row['answers']}",
                row["wrong"] + row["wrong_from_cache"], 0)
        for name, row in ((name, row[CHECKED]) for name, row in figures.items())
    ]  # fmt: skip
