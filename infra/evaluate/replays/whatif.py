"""Replays a trace's requests in the simulator, with or without faults.

Requests are sent at their recorded times, each with its session, its class's default weights and
its recorded tokens; searches are left out. Times are those of the simulated GPU and model
(`infra/simulator/machine/latency.py`). Called by `trivium replay`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infra.evaluate.replays.deployment import Workers
from infra.planning.point import ORDERS
from infra.simulator.cluster import READY_MS, Cluster, SimFault
from infra.simulator.machine.latency import Setup
from infra.simulator.members.clients import ClientRequest
from infra.simulator.outcomes import OneOutcome
from infra.simulator.shape import ClusterShape
from infra.simulator.traffic.traces import script
from infra.traces.trace import Trace
from streams.agents.router import load_table
from streams.config import RouterSettings

TIMEOUT_MS = 120_000
LATE_MS = 100.0  # least delay by faults that counts


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Result of one run: its requests, and the KV bytes moved."""

    served: list[ClientRequest]
    kv_bytes: int

    def figures(self) -> dict[str, float]:
        """Return counts, and times in ms of completed requests."""
        answers = [request for request in self.served if request.completed]
        modes = Counter(answer.mode.value for answer in answers)
        summary: dict[str, float] = {
            "requests": len(self.served),
            "completed": len(answers),
            "placed again": sum(e.outcome.attempt > 1 for e in self.served if e.outcome),
            **dict(sorted(modes.items())),
            "KV moved, MB": round(self.kv_bytes / 1e6, 1),
        }
        times = {
            "TTFT": [answer.ttft_ms for answer in answers],
            "TPOT": [answer.tpot_ms for answer in answers if answer.output_tokens > 1],
            "latency": [answer.took_ms for answer in answers],
        }
        for name, values in times.items():
            for percent in (50, 99) if values else ():
                summary[f"{name} p{percent}, ms"] = round(float(np.percentile(values, percent)), 2)
        return summary


def setup_of() -> Setup:
    """Return a setup whose workers send tokens every fourth step, so that faults strike during
    answers."""
    return Setup(ack_ms=2.0, steps_max=4)


def replay_trace(
    trace: Trace,
    shape: ClusterShape,
    settings: RouterSettings,
    faults: Sequence[SimFault] = (),
    *,
    setup: Setup,
) -> ReplayResult:
    """Simulate a trace to its end; recorded workers keep their orders, others have vLLM's
    default."""
    orders = shape.orders if isinstance(shape, Workers) else ()
    cluster = Cluster(
        shape,
        setup,
        settings,
        timeout_ms=TIMEOUT_MS,
        gateways=1,
        orchestrations=orders or ORDERS,
        table=load_table(settings),
        keeps_log=bool(faults),
        checkers=[OneOutcome()],
        faults=faults,
    )
    cluster.run(
        script(
            trace.arrivals,
            begin_ms=READY_MS,
            faster=1.0,
            block_tokens=setup.block_tokens,
            named_tokens=trace.block_tokens,
        )
    )
    cluster.finish()
    return ReplayResult(
        served=cluster.clients.requests, kv_bytes=sum(cluster.links.moved_bytes.values())
    )


def later_ms(before: ReplayResult, after: ReplayResult) -> list[float]:
    """Return the delays above `LATE_MS` of requests that both runs completed, in ms, sorted."""
    took_ms = {
        request.request_id: request.took_ms for request in before.served if request.completed
    }
    answers = [
        request for request in after.served if request.completed and request.request_id in took_ms
    ]
    late = [answer.took_ms - took_ms[answer.request_id] for answer in answers]
    return sorted(delay_ms for delay_ms in late if delay_ms > LATE_MS)
