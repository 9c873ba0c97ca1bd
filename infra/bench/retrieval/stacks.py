"""The stacks that the retrieval benchmark asks: one that answers, and one whose engines are
simulated; both with real embeddings and a real index.
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
from streams.gateway.config import GatewaySettings
from workers.embed.settings import EmbeddingSettings
from workers.models.wheels import MINILM

_ANSWER_TOKENS, _LOOKUP_MS = 16, 2_000
_BUDGET_MS = 60_000  # for the first token: what is measured is whether answers are right


def answering_stack(name: str) -> Stack:
    """The model that `trivium up` serves, on one worker in both roles."""
    folder = _folder(name)
    settings = Settings(
        broker=BrokerSettings(port=0),
        gateway=GatewaySettings(port=0, ttft_ms=_BUDGET_MS, deadline_ms=600_000),
    )
    return Stack(
        settings, StackPlan(prefill=0, decode=0, replica=1, retrieval=1, embedding=1), folder=folder
    )


def simulated_stack(name: str) -> Stack:
    """Engines that take little of the cores, and whose answers end by themselves: others are not
    kept. A look for one that was kept has all the time that it needs.
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
    """Two shards, the first with two replicas, and vectors of no model: what is measured is whether
    answers come and what they say.
    """
    return make_stack(StackPlan(retrieval=3, shards=2, embedding=1), _folder(name))


@asynccontextmanager
async def running(stack: Stack) -> AsyncIterator[Stack]:
    """Started, and stopped at the end."""
    try:
        await stack.start()
        yield stack
    finally:
        await stack.stop(grace_s=10)


def _folder(name: str) -> Path:
    folder = BENCH_DIR.absolute() / name
    shutil.rmtree(folder, ignore_errors=True)
    return folder
