"""Section [scaling]: what users are to see, and how many workers there may be."""

from schemas.sections import Natural, NonNegative, Positive, section


@section("scaling")
class ScalingSettings:
    """Targets, bounds and patience of `trivium scale` and `trivium up --autoscale`."""

    ttft_ms: Positive = 1_000  # to the first token; what waits longer is a backlog
    tpot_ms: NonNegative = 0.0  # between tokens of an answer; 0: as slow as full batches are
    # a worker takes so long to start, until one was measured: where more comes, so far ahead
    start_ms: Natural = 20_000
    settle_ms: Positive = 10_000  # a backlog is to be gone in so long, or in half of its slack
    up_after_ms: Natural = 2_000  # a pool grows once so many were wanted for so long
    down_after_ms: Natural = 60_000  # it shrinks to the most that were wanted for so long
    workers_max: Positive = 8  # prefill and decode together, or replicas
    copies_max: Positive = 4  # of each shard of the retrieval pool
