"""The stacks of the platform benchmark: one of every kind of process to kill, and one of vLLM.

Engines take so long for a step that places in them are what is scarce, and not the cores.
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
from streams.gateway.config import GatewaySettings

PLAN = StackPlan(prefill=1, decode=1, replica=1, routers=2, gateways=2, bridges=2)
RUNNING_MAX = 64  # answers at once on each worker that decodes
STEP_MS = 20.0


def hurt_stack() -> Stack:
    """Simulated engines; answers to a key's prompts keep their order."""
    stack = make_stack(
        PLAN, BENCH_DIR.absolute() / "platform", decode_step_ms=STEP_MS, running_max=RUNNING_MAX
    )
    prefix = stack.settings.log.topic_prefix
    pair = TopicPair(prompts=f"{prefix}prompts", answers=f"{prefix}answers", ordered=True)
    stack.settings = dataclasses.replace(stack.settings, bridge=BridgeSettings(pairs=(pair,)))
    return stack


def in_flight(stack: Stack) -> int:
    """Questions that bridges have under way at most: as many HTTP clients are as much load."""
    workers = stack.plan.decode + stack.plan.replica
    return int(workers * RUNNING_MAX * stack.settings.bridge.share)


def vllm_stack() -> Stack:
    """The model that `trivium up` serves, on one worker in both roles, and one bridge."""
    folder: Path = BENCH_DIR.absolute() / "platform-vllm"
    shutil.rmtree(folder, ignore_errors=True)
    settings = Settings(
        broker=BrokerSettings(port=0),
        gateway=GatewaySettings(port=0, ttft_ms=600_000, deadline_ms=1_200_000),
    )
    plan = StackPlan(prefill=0, decode=0, replica=1, bridges=1)
    return Stack(settings, plan, folder=folder)
