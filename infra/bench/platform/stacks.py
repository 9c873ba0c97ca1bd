"""The stacks of the platform benchmark: one with every kind of process to kill, one with vLLM.

A step of the simulated engines is so slow that their slots limit the rate, and not the cores.
"""

import dataclasses
import shutil
from pathlib import Path

from infra.bench.faults.target_stack import make_stack
from infra.bench.results import BENCH_DIR
from infra.broker.section import BrokerSettings
from infra.stack.configuration import Settings
from infra.stack.launcher import Stack
from infra.stack.plan import StackPlan
from streams.bridge.config import BridgeSettings, TopicPair
from streams.calls.config import GatewaySettings

PLAN = StackPlan(prefill=1, decode=1, replica=1, routers=2, gateways=2, bridges=2)
RUNNING_MAX = 64  # answers at once on each worker that decodes
STEP_MS = 20.0


def hurt_stack() -> Stack:
    """Return a stack with simulated engines, where answers with one key keep their order."""
    stack = make_stack(
        PLAN, BENCH_DIR.absolute() / "platform", decode_step_ms=STEP_MS, running_max=RUNNING_MAX
    )
    prefix = stack.settings.log.topic_prefix
    pair = TopicPair(prompts=f"{prefix}prompts", answers=f"{prefix}answers", ordered=True)
    stack.settings = dataclasses.replace(stack.settings, bridge=BridgeSettings(pairs=(pair,)))
    return stack


def in_flight(stack: Stack) -> int:
    """Return the maximum of requests that bridges have in flight; as many HTTP clients equal it."""
    workers = stack.plan.decode + stack.plan.replica
    return int(workers * RUNNING_MAX * stack.settings.bridge.share)


def vllm_stack() -> Stack:
    """Return a stack with the model that `trivium up` serves: one replica worker, one bridge."""
    folder: Path = BENCH_DIR.absolute() / "platform-vllm"
    shutil.rmtree(folder, ignore_errors=True)
    settings = Settings(
        broker=BrokerSettings(port=0),
        gateway=GatewaySettings(port=0, ttft_ms=600_000, deadline_ms=1_200_000),
    )
    plan = StackPlan(prefill=0, decode=0, replica=1, bridges=1)
    return Stack(settings, plan, folder=folder)
