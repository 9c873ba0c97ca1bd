"""The demand of a traffic log: the rate of its busiest minute, and its mean lengths."""

from dataclasses import dataclass
from pathlib import Path

from infra.traces import formats
from infra.traces.summary import rates
from schemas.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSummary:
    """Summary of a traffic log: requests/s, and lengths in tokens."""

    requests: int
    mean_per_s: float
    busiest_per_s: float  # of any minute
    prompt_tokens: float
    answer_tokens: float


def read(path: Path) -> TrafficSummary:
    """Read a trace in any format of `infra/traces`; raises ConfigError for fewer than two
    requests."""
    arrivals = formats.read(path).arrivals
    if len(arrivals) < 2:
        raise ConfigError(f"--trace {path}: expected at least two requests, found {len(arrivals)}")
    mean_per_s, busiest_per_s = rates(arrivals)
    return TrafficSummary(
        requests=len(arrivals),
        mean_per_s=mean_per_s,
        busiest_per_s=busiest_per_s,
        prompt_tokens=sum(arrival.prompt_tokens for arrival in arrivals) / len(arrivals),
        answer_tokens=sum(arrival.output_tokens for arrival in arrivals) / len(arrivals),
    )
