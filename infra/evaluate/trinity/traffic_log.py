"""What a traffic log asks of a cluster: its busiest minute, and its mean lengths."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.simulator.traffic.traces import Arrival, azure, mooncake
from schemas.errors import ConfigError

_WINDOW_MS = 60_000.0
READERS = {".csv": azure, ".jsonl": mooncake}


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """Rates in requests/s, lengths in tokens."""

    requests: int
    mean_per_s: float
    busiest_per_s: float  # of any minute
    prompt_tokens: float
    answer_tokens: float


def read(path: Path) -> Logged:
    """A trace as Azure (.csv) or Mooncake (.jsonl) publish theirs; raises ConfigError."""
    reader = READERS.get(path.suffix)
    if reader is None:
        raise ConfigError(
            f"--trace {path}: expected a .csv file as Azure publishes (TIMESTAMP, ContextTokens, "
            "GeneratedTokens) or a .jsonl file as Mooncake does (timestamp, input_length, "
            "output_length, hash_ids)"
        )
    try:
        arrivals = reader(path)
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise ConfigError(
            f"--trace {path}: not a trace of its kind: {type(error).__name__} {error}"
        ) from error
    return summary(arrivals, str(path))


def summary(arrivals: Sequence[Arrival], name: str) -> Logged:
    """Of any arrivals; a log shorter than a minute counts as one as long as it is."""
    if len(arrivals) < 2:
        raise ConfigError(f"--trace {name}: expected at least two requests, found {len(arrivals)}")
    first_ms = min(each.at_ms for each in arrivals)
    length_ms = max(each.at_ms for each in arrivals) - first_ms
    window_ms = min(_WINDOW_MS, length_ms) or 1.0
    windows = Counter(int((each.at_ms - first_ms) / window_ms) for each in arrivals)
    return Logged(
        requests=len(arrivals),
        mean_per_s=1e3 * len(arrivals) / max(length_ms, window_ms),
        busiest_per_s=1e3 * max(windows.values()) / window_ms,
        prompt_tokens=sum(each.prompt_tokens for each in arrivals) / len(arrivals),
        answer_tokens=sum(each.output_tokens for each in arrivals) / len(arrivals),
    )
