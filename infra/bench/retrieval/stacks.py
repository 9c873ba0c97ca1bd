"""The stacks of the retrieval benchmark: one with a real model, two with simulated engines.

All have a real index, and all but the sharded one have a real embedding model.
"""

import dataclasses
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from infra.bench.faults.target_stack import make_stack
from infra.bench.results import BENCH_DIR
from infra.broker.section import BrokerSettings
from infra.stack.configuration import Settings
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from streams.calls.config import GatewaySettings
from workers.embed.settings import EmbeddingSettings
from workers.models.wheels import MINILM

_ANSWER_TOKENS, _LOOKUP_MS = 16, 2_000
_BUDGET_MS = 60_000  # for the first token; long, since only the quality of answers is measured


def answering_stack(name: str) -> Stack:
    """Return a stack with the model that `trivium up` serves, on one replica worker."""
    folder = _folder(name)
    settings = Settings(
        broker=BrokerSettings(port=0),
        gateway=GatewaySettings(port=0, ttft_ms=_BUDGET_MS, deadline_ms=600_000),
    )
    return Stack(
        settings, StackPlan(prefill=0, decode=0, replica=1, retrieval=1, embedding=1), folder=folder
    )


def simulated_stack(name: str) -> Stack:
    """Return a stack whose engines use little CPU and end their answers before `max_tokens`, since
    gateways cache only such answers. Lookups in the response cache may take long.
    """
    plan = StackPlan(retrieval=1, embedding=1)
    stack = make_stack(plan, _folder(name), end_every_tokens=_ANSWER_TOKENS)
    stack.settings = dataclasses.replace(
        stack.settings,
        embedding=EmbeddingSettings(model=MINILM),
        gateway=dataclasses.replace(stack.settings.gateway, cache_wait_ms=_LOOKUP_MS),
    )
    return stack


def sharded_stack(name: str) -> Stack:
    """Return a stack with two shards, the first with two replicas. No model computes its vectors,
    since only the arrival and the reports of answers are measured.
    """
    return make_stack(StackPlan(retrieval=3, shards=2, embedding=1), _folder(name))


@asynccontextmanager
async def running(stack: Stack) -> AsyncIterator[Stack]:
    """Start the stack, and stop it when the block ends."""
    try:
        await stack.start()
        yield stack
    finally:
        await stack.stop(grace_s=10)


def _folder(name: str) -> Path:
    folder = BENCH_DIR.absolute() / name
    shutil.rmtree(folder, ignore_errors=True)
    return folder
