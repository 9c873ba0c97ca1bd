"""The kinds of faults by name: what each does to a cluster now; and the end of all faults.

A kind gets a generator of its own, and the request at which it is aimed, if any. Faults of workers
then mostly hit a worker of that request.
"""

from collections.abc import Callable

import numpy as np

from infra.simulator.cluster import Cluster
from infra.simulator.faults import hostile, losses, members
from infra.simulator.members.worker import SimWorker
from schemas.fleet import LEASE_MS
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


def _lose_worker(cluster: Cluster, draw: Draw, live: LiveRequest | None) -> None:
    name = _worker(cluster, draw, live).worker_id
    if draw.random() < ENDING_SHARE:
        late_ms, for_ms = draw.uniform(200.0, 1_500.0), draw.uniform(1.0, 200.0)
        losses.crash_on_outcome(cluster, name, late_ms, for_ms)
        return
    losses.crash(cluster, name)
    cluster.clock.after(draw.uniform(100.0, 4_000.0), lambda: losses.restart(cluster, name))


def _lose_router(cluster: Cluster, draw: Draw, live: LiveRequest | None) -> None:
    for_ms, orders_first = draw.uniform(100.0, 2_500.0), bool(draw.random() < 0.5)
    if orders_first:  # the next router comes while that work is in flight
        for_ms = draw.uniform(1.0, 100.0)
    sends = 1 if orders_first else int(draw.integers(4))
    losses.lose_router(cluster, sends, for_ms, orders_first=orders_first)


def _lose_gateway(cluster: Cluster, draw: Draw, live: LiveRequest | None) -> None:
    name = _gateway(cluster, draw, live)
    after_ms = [draw.uniform(0.0, 3_000.0) if draw.random() < 0.6 else None for _ in range(7)]
    losses.lose_gateway(cluster, name, after_ms)
    back_ms = draw.uniform(100.0, 3_000.0)
    cluster.clock.after(back_ms, lambda: losses.restart_gateway(cluster, name))


def _cut_gateway(cluster: Cluster, draw: Draw, live: LiveRequest | None) -> None:
    """Cut a gateway off; its clients wait for it, or some resume elsewhere meanwhile."""
    name, for_ms = _gateway(cluster, draw, live), draw.uniform(100.0, 3_000.0)
    after_ms: list[float | None] = [None]
    if draw.random() < 0.5:
        after_ms = [draw.uniform(0.0, for_ms) if draw.random() < 0.6 else None for _ in range(7)]
    losses.cut_gateway(cluster, name, for_ms, after_ms)


def _hang_up(cluster: Cluster, draw: Draw, live: LiveRequest | None) -> None:
    waiting = [request.request_id for request in cluster.clients.waiting if not request.has_left]
    aimed = [name for name in waiting if live is not None and name == live.request_id]
    if waiting:
        losses.leave(cluster, aimed[0] if aimed else waiting[int(draw.integers(len(waiting)))])


def _slow_worker(cluster: Cluster, draw: Draw, live: LiveRequest | None) -> None:
    """Slow a worker's prefill down, or stall it over each prompt."""
    worker, times = _worker(cluster, draw, live), draw.uniform(2.0, 20.0)
    if times < SLOW_TIMES:
        losses.slow_prefill(cluster, worker.worker_id, times)
    else:
        members.stall_over_input(cluster, worker, times / STALL_TIMES)


def _large_record(cluster: Cluster, draw: Draw, live: LiveRequest | None) -> None:
    size = cluster.bus.record_bytes_max - int(draw.integers(NEAR_BYTES))
    hostile.large_request(cluster, size)


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
    "worker crash": _lose_worker,
    "worker drain": lambda cluster, draw, live: losses.drain(
        cluster, _worker(cluster, draw, live).worker_id, draw.uniform(50.0, 2_000.0)
    ),
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
    "router crash": _lose_router,
    "router pause": lambda cluster, draw, live: members.pause_router(
        cluster, draw.uniform(50.0, 5_000.0)
    ),
    "gateway crash": _lose_gateway,
    "gateway cut off": _cut_gateway,
    "client leaves": _hang_up,
    "slow log": lambda cluster, draw, live: losses.slow_log(
        cluster, draw.uniform(5.0, 80.0), draw.uniform(100.0, 1_500.0)
    ),
    "broker outage": lambda cluster, draw, live: members.lose_broker(
        cluster, draw.uniform(100.0, 5_000.0)
    ),
    UNCLEAN: _unclean_leader,
    "repeated record": _repeat,
    "producer retry": _retry,
    "reordered topics": _reorder,
    "slow links": lambda cluster, draw, live: losses.slow_links(cluster, draw.uniform(2.0, 50.0)),
    "KV failure": _fail_kv,
    "large record": _large_record,
    "forged record": lambda cluster, draw, live: hostile.forge_record(cluster, draw),
}


def heal(cluster: Cluster) -> None:
    """Heal all faults of a cluster."""
    bus = cluster.bus
    bus.delay_ms, bus.held_until_ms = cluster.setup.bus_ms, 0.0
    for pending in (bus.slow, bus.repeat_after_ms, bus.repeated_topics, bus.losing):
        pending.clear()
    cluster.links.slow, cluster.exchange.failures = 1.0, 0
    _heal_workers(cluster)
    while cluster.router.is_asleep:  # twice if it slept and was replaced by one that sleeps
        cluster.router.wake()
    if not cluster.router.alive:
        cluster.router.take_over()
        cluster.members.join_router()
    for name, gateway in cluster.gateways.by_id.items():
        if gateway.is_cut:
            cluster.members.join_gateway(cluster.gateways.join_again(name))
        elif not gateway.alive:
            cluster.members.join_gateway(cluster.gateways.restart(name))


def _heal_workers(cluster: Cluster) -> None:
    workers = {name: cluster.workers[name] for name, _ in cluster.shape.roles()}
    changes = cluster.models.settle({name: worker.served for name, worker in workers.items()})
    for name, worker in workers.items():
        worker.served = changes.get(name, worker.served)
        worker.wall.ahead_ms, worker.is_mute = 0.0, False
        late = cluster.clock.now_ms - worker.beat_ms >= LEASE_MS
        if not worker.alive:
            worker.restart()
            cluster.members.join(worker)
        elif late or worker.process.requests.draining or name in changes:
            cluster.members.rejoin(worker)
        elif worker.clock.is_asleep:
            worker.clock.wake()
        worker.clear_slowdown()
