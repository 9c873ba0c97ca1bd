"""Section [scaling]: latency targets for users, and bounds on the number of workers."""

from schemas.sections import Natural, NonNegative, Positive, section


@section("scaling")
class ScalingSettings:
    """Targets, bounds and delays of `trivium scale` and `trivium up --autoscale`."""

    ttft_ms: Positive = 1_000  # target for the first token; older queues are a backlog
    tpot_ms: NonNegative = 0.0  # target between tokens of an answer; 0: none
    # expected start of a worker until one is measured; the policy looks this far ahead
    start_ms: Natural = 20_000
    settle_ms: Positive = 10_000  # time to clear a backlog, or half of its slack
    up_after_ms: Natural = 2_000  # a pool grows once more were wanted for this long
    down_after_ms: Natural = 60_000  # it shrinks to the most wanted during this time
    workers_max: Positive = 8  # prefill and decode together, or replicas
    copies_max: Positive = 4  # of each shard of the retrieval pool
