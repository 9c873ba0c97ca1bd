"""The kinds of faults by name: what each does to a cluster now, and how it ends.

A kind gets a generator of its own, and the request at which it is aimed, if any. Faults of workers
then mostly hit a worker of that request.
"""

from collections.abc import Callable

import numpy as np

from infra.simulator.cluster import Cluster, SimFault
from infra.simulator.faults import hostile, losses, members
from infra.simulator.members.worker import SimWorker
from streams.core.requests.live import LiveRequest

Draw = np.random.Generator
Kind = Callable[[Cluster, Draw, LiveRequest | None], None]
UNCLEAN = "unclean leader"
AIMED_SHARE = 0.7
ENDING_SHARE = 0.4  # share of crashes at an outcome
SLOW_TIMES = 11.0  # slower prefill; with a larger factor, the worker stalls instead
STALL_TIMES = 20.0  # factor / this = stall in ms per token; over a large prompt longer than a lease
NEAR_BYTES = 600  # a large request is at most this far below the log's limit
TOPICS = (*hostile.TOPICS, "cancellations", "decisions")


def _worker(cluster: Cluster, draw: Draw, live: LiveRequest | None) -> SimWorker:
    """Return a worker, mostly one that serves the request."""
    holders = [life[0] for life in live.holders if life[0] in cluster.workers] if live else []
    names = [name for name, _ in cluster.shape.roles()]
    aimed = holders if holders and draw.random() < AIMED_SHARE else names
    return cluster.workers[aimed[int(draw.integers(len(aimed)))]]


def _gateway(cluster: Cluster, draw: Draw, live: LiveRequest | None) -> str:
    """Return a gateway's id, mostly of one that reads the answer."""
    readers = [name for name, _ in live.readers.gateways] if live else []
    names = list(cluster.gateways.by_id)
    aimed = readers if readers and draw.random() < AIMED_SHARE else names
    return aimed[int(draw.integers(len(aimed)))]


def _at_once(make: Callable[[Cluster, Draw, LiveRequest | None], tuple[SimFault, ...]]) -> Kind:
    """Return a kind whose faults have times from now on; the first one strikes at once."""

    def strike(cluster: Cluster, draw: Draw, live: LiveRequest | None) -> None:
        now_ms = cluster.clock.now_ms
        for number, fault in enumerate(make(cluster, draw, live)):
            if number == 0:
                fault.strike(cluster)
            else:
                cluster.clock.at(now_ms + fault.at_ms, lambda fault=fault: fault.strike(cluster))  # type: ignore[misc]  # bound now

    return strike


def _lose_worker(cluster: Cluster, draw: Draw, live: LiveRequest | None) -> tuple[SimFault, ...]:
    name = _worker(cluster, draw, live).worker_id
    if draw.random() < ENDING_SHARE:
        late_ms, for_ms = draw.uniform(200.0, 1_500.0), draw.uniform(1.0, 200.0)
        return (losses.crash_on_outcome(0.0, name, late_ms, for_ms),)
    return losses.crash(0.0, name), losses.restart(draw.uniform(100.0, 4_000.0), name)


def _drain(cluster: Cluster, draw: Draw, live: LiveRequest | None) -> tuple[SimFault, ...]:
    name = _worker(cluster, draw, live).worker_id
    return (losses.drain(0.0, name, draw.uniform(50.0, 2_000.0)),)


def _lose_router(cluster: Cluster, draw: Draw, live: LiveRequest | None) -> tuple[SimFault, ...]:
    for_ms, orders_first = draw.uniform(100.0, 2_500.0), bool(draw.random() < 0.5)
    if orders_first:  # the next router comes while that work is in flight
        for_ms = draw.uniform(1.0, 100.0)
    sends = 1 if orders_first else int(draw.integers(4))
    return (losses.lose_router(0.0, sends, for_ms, orders_first=orders_first),)


def _lose_gateway(cluster: Cluster, draw: Draw, live: LiveRequest | None) -> tuple[SimFault, ...]:
    name = _gateway(cluster, draw, live)
    after_ms = [draw.uniform(0.0, 3_000.0) if draw.random() < 0.6 else None for _ in range(7)]
    back_ms = draw.uniform(100.0, 3_000.0)
    return losses.lose_gateway(0.0, name, after_ms), losses.restart_gateway(back_ms, name)


def _cut_gateway(cluster: Cluster, draw: Draw, live: LiveRequest | None) -> tuple[SimFault, ...]:
    """Cut a gateway off; its clients wait for it, or some resume elsewhere meanwhile."""
    name, for_ms = _gateway(cluster, draw, live), draw.uniform(100.0, 3_000.0)
    after_ms: list[float | None] = [None]
    if draw.random() < 0.5:
        after_ms = [draw.uniform(0.0, for_ms) if draw.random() < 0.6 else None for _ in range(7)]
    return (losses.cut_gateway(0.0, name, for_ms, after_ms),)


def _hang_up(cluster: Cluster, draw: Draw, live: LiveRequest | None) -> None:
    waiting = [request.request_id for request in cluster.clients.waiting if not request.has_left]
    aimed = [name for name in waiting if live is not None and name == live.request_id]
    if waiting:
        losses.leave(cluster, aimed[0] if aimed else waiting[int(draw.integers(len(waiting)))])


def _slow_worker(cluster: Cluster, draw: Draw, live: LiveRequest | None) -> None:
    """Slow a worker's prefill down, or stall it over each prompt."""
    worker, times = _worker(cluster, draw, live), draw.uniform(2.0, 20.0)
    if times < SLOW_TIMES:
        losses.slow_prefill(0.0, [worker.worker_id], times).strike(cluster)
    else:
        members.stall_over_input(cluster, worker, times / STALL_TIMES)


def _large_record(cluster: Cluster, draw: Draw, live: LiveRequest | None) -> None:
    size = cluster.bus.record_bytes_max - int(draw.integers(NEAR_BYTES))
    hostile.large_request(cluster.clock.now_ms, size).strike(cluster)


def _repeat(cluster: Cluster, draw: Draw, live: LiveRequest | None) -> None:
    cluster.bus.repeated_topics.update(str(topic) for topic in draw.choice(TOPICS, 3))


def _retry(cluster: Cluster, draw: Draw, live: LiveRequest | None) -> None:
    for topic in draw.choice(TOPICS, 3):
        cluster.bus.repeat_after_ms[str(topic)] = draw.uniform(1.0, 300.0)


def _reorder(cluster: Cluster, draw: Draw, live: LiveRequest | None) -> None:
    topics = [str(topic) for topic in draw.choice(TOPICS, 3)]
    cluster.bus.slow.update({topic: draw.uniform(5.0, 500.0) for topic in topics})

    def usual() -> None:
        for topic in topics:
            cluster.bus.slow.pop(topic, None)

    cluster.clock.after(draw.uniform(100.0, 1_500.0), usual)


def _unclean_leader(cluster: Cluster, draw: Draw, live: LiveRequest | None) -> None:
    """Lose the next token records: tokens are not written durably, so the last ones may be lost."""
    cluster.bus.losing["tokens"] = int(draw.integers(1, 6))


def _fail_kv(cluster: Cluster, draw: Draw, live: LiveRequest | None) -> None:
    cluster.exchange.failures = int(draw.integers(1, 4))


KINDS: dict[str, Kind] = {
    "worker crash": _at_once(_lose_worker),
    "worker drain": _at_once(_drain),
    "worker pause": lambda cluster, draw, live: members.pause_worker(
        cluster, _worker(cluster, draw, live), draw.uniform(50.0, 5_000.0)
    ),
    "lost lease": lambda cluster, draw, live: members.mute_worker(
        cluster, _worker(cluster, draw, live), draw.uniform(500.0, 6_000.0)
    ),
    "slow worker": _slow_worker,
    "stale heartbeat": lambda cluster, draw, live: members.stale_heartbeat(
        cluster, _worker(cluster, draw, live), int(draw.integers(1, 5))
    ),
    "clock jump": lambda cluster, draw, live: members.set_clock(
        _worker(cluster, draw, live), draw.uniform(-members.SKEW_MS_MAX, members.SKEW_MS_MAX)
    ),
    "router crash": _at_once(_lose_router),
    "router pause": lambda cluster, draw, live: members.pause_router(
        cluster, draw.uniform(50.0, 5_000.0)
    ),
    "gateway crash": _at_once(_lose_gateway),
    "gateway cut off": _at_once(_cut_gateway),
    "client leaves": _hang_up,
    "slow log": _at_once(
        lambda cluster, draw, live: (
            losses.slow_log(0.0, draw.uniform(5.0, 80.0), draw.uniform(100.0, 1_500.0)),
        )
    ),
    "broker outage": lambda cluster, draw, live: members.lose_broker(
        cluster, draw.uniform(100.0, 5_000.0)
    ),
    UNCLEAN: _unclean_leader,
    "repeated record": _repeat,
    "producer retry": _retry,
    "reordered topics": _reorder,
    "slow links": lambda cluster, draw, live: losses.slow_links(
        0.0, draw.uniform(2.0, 50.0)
    ).strike(cluster),
    "KV failure": _fail_kv,
    "large record": _large_record,
    "forged record": lambda cluster, draw, live: hostile.forge_record(
        cluster.clock.now_ms, draw
    ).strike(cluster),
}
