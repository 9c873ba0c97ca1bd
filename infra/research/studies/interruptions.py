"""How often other prompts interrupt an answer: on a replica, and on a prefill and decode pair.

The Neuron guide's figure: in a continuous batch of 8, 7 prompts interrupt each answer; with
disaggregation there is one interruption, by its own transfer. So `BATCH` clients send requests
without pause, each with one prompt and one answer. A gap between two tokens of an answer longer
than `LONG` times a quiet gap is an interruption; several such gaps in a row are one.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from infra.planning.point import ORDERS, TICK_MS
from infra.simulator.cluster import READY_MS, Checker, Cluster
from infra.simulator.log.clock import Clock
from infra.simulator.machine.latency import Setup
from infra.simulator.members.clients import ClientRequest
from infra.simulator.outcomes import OneOutcome
from infra.simulator.shape import ClusterShape
from infra.simulator.traffic.poisson import unique_tokens
from infra.simulator.traffic.script import SimConversation, SimTurn, conversation
from streams.config import RouterSettings

BATCH = 8
LONG = 1.5
QUIET = 5  # percentile of gaps that counts as quiet: no prompt beside it
POLICIES = {"1R": "replica", "1P1D": "static"}


class TokenTimes(Checker):
    """A checker that records when each token of each answer arrives."""

    def __init__(self) -> None:
        self.clock = Clock()  # replaced by the cluster's clock
        self.at_ms: dict[str, list[float]] = defaultdict(list)

    def on_tokens(self, request: ClientRequest, tokens: Sequence[int], text: str) -> None:
        """Record the arrival; tokens that arrive together have the same time."""
        self.at_ms[request.request_id] += [self.clock.now_ms] * len(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptionResult:
    """Token gaps that the clients of one fleet saw; times in ms."""

    pools: str
    answers: int
    per_answer: float  # mean number of interruptions
    itl_p50: float
    itl_p99: float
    itl_max: float
    ttft_p50: float


def measure_interruptions(
    pools: str,
    *,
    answers: int = 160,
    prompt_tokens: int = 2_048,
    answer_tokens: int = 200,
    setup: Setup | None = None,
) -> InterruptionResult:
    """Serve `answers` answers, `BATCH` at a time, and count interruptions."""
    setup = replace(setup or Setup(), steps_max=1)
    token_times = TokenTimes()
    cluster = Cluster(
        ClusterShape.parse(pools),
        setup,
        RouterSettings(policy=POLICIES[pools], tick_ms=TICK_MS),
        timeout_ms=600_000,
        conversations_max=BATCH,
        orchestrations=ORDERS,
        checkers=[OneOutcome(), token_times],
    )
    token_times.clock = cluster.clock
    cluster.run(list(_conversations(answers, prompt_tokens, answer_tokens, setup.block_tokens)))
    cluster.finish()
    steady = [request for request in cluster.clients.requests[BATCH:-BATCH] if request.completed]
    gaps = [np.diff(token_times.at_ms[answer.request_id]) for answer in steady]
    every = np.concatenate(gaps)
    long_ms = LONG * float(np.percentile(every, QUIET))
    return InterruptionResult(
        pools=pools,
        answers=len(steady),
        per_answer=float(np.mean([runs(list(gaps_ms > long_ms)) for gaps_ms in gaps])),
        itl_p50=float(np.median(every)),
        itl_p99=float(np.percentile(every, 99)),
        itl_max=float(np.max(every)),
        ttft_p50=float(np.median([answer.ttft_ms for answer in steady])),
    )


def runs(long: Sequence[bool]) -> int:
    """Count the runs of consecutive long gaps."""
    return sum(now and not before for before, now in pairwise([False, *long]))


def _conversations(
    answers: int, prompt: int, answer: int, block_tokens: int
) -> Iterator[SimConversation]:
    """Yield conversations for one time; the first `BATCH` have all lengths, so that ends are
    spread."""
    for number in range(answers):
        output = answer * (number + 1) // BATCH if number < BATCH else answer
        turn = SimTurn(prompt_tokens=prompt, output_tokens=max(1, output))
        tokens = unique_tokens(number, prompt + max(1, output))
        yield conversation(f"asked-{number}", READY_MS, [turn], tokens, block_tokens)
