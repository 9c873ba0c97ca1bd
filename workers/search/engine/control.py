"""The control loop of the scheduler: moves prefill's share and its flush timeout.

Trinity, section 3.3, names the three signals and the directions; the law is ours. Each signal is
its excess over a target: KV links that run below their bandwidth target and prefill searches that
wait too long ask for more prefill, decode time that is stalled on retrieval asks for less. The
weighted sum moves the share in a line and the timeout by a factor. A dead band, a slew limit and
bounds keep it from swinging. Pure: the caller runs it every few hundred milliseconds and records
the moves.
"""

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, PositiveFloat

from schemas.errors import ConfigError
from schemas.sections import NonNegative, Positive, section


@section("retrieval")
class ControlSettings:
    """Targets, weights and limits; section [retrieval] has them all."""

    control_interval_ms: Positive = 300
    # of all KV moved between workers; 0: not watched
    link_target_bytes_per_s: NonNegative = 0.0
    wait_target_ms: PositiveFloat = 20.0  # prefill's wait for a slot, 95th percentile
    stall_target: PositiveFloat = 0.2  # share of decode time that waits for retrievals
    link_weight: NonNegative = 1.0  # of each signal's excess over its target
    wait_weight: NonNegative = 1.0
    stall_weight: NonNegative = 1.0
    share_gain: NonNegative = 0.1  # of the share, per error
    flush_gain: NonNegative = 0.3  # of the flush timeout's logarithm
    share_min: float = 0.0
    share_max: float = 0.9
    flush_min_ms: float = 0.2
    flush_max_ms: float = 50.0
    dead_band: NonNegative = 0.1  # of the error
    share_step_max: NonNegative = 0.1  # slew: of one move
    flush_factor_max: Annotated[float, Field(ge=1)] = 2.0  # likewise

    def __post_init__(self) -> None:
        if not 0 <= self.share_min <= self.share_max <= 1:
            raise ConfigError(
                "retrieval.share_min and share_max: expected 0 <= min <= max <= 1, "
                f"found {self.share_min} and {self.share_max}"
            )
        if not 0 < self.flush_min_ms <= self.flush_max_ms:
            raise ConfigError(
                "retrieval.flush_min_ms and flush_max_ms: expected 0 < min <= max, "
                f"found {self.flush_min_ms} and {self.flush_max_ms}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """What the loop looks at; None where nothing was measured since the last time."""

    link_bytes_per_s: float | None = None
    prefill_wait_ms_p95: float | None = None
    decode_stalled_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One step of the loop, with what led to it."""

    signals: Signals
    error: float  # above 0: prefill needs more
    share_before: float
    share: float
    flush_ms_before: float
    flush_ms: float

    @property
    def is_still(self) -> bool:
        """Whether nothing changed."""
        return self.share == self.share_before and self.flush_ms == self.flush_ms_before


def move(settings: ControlSettings, signals: Signals, share: float, flush_ms: float) -> Move:
    """The next share and flush timeout (ms)."""
    wrong = error(settings, signals)
    new_share, new_flush_ms = share, flush_ms
    if abs(wrong) > settings.dead_band:
        step = _clip(settings.share_gain * wrong, settings.share_step_max)
        new_share = min(settings.share_max, max(settings.share_min, share + step))
        turn = _clip(settings.flush_gain * wrong, math.log(settings.flush_factor_max))
        new_flush_ms = flush_ms * math.exp(-turn)
        new_flush_ms = min(settings.flush_max_ms, max(settings.flush_min_ms, new_flush_ms))
    return Move(
        signals=signals,
        error=wrong,
        share_before=share,
        share=new_share,
        flush_ms_before=flush_ms,
        flush_ms=new_flush_ms,
    )


def error(settings: ControlSettings, signals: Signals) -> float:
    """The weighted excess of the signals over their targets; above 0 prefill needs more."""
    total = 0.0
    if signals.link_bytes_per_s is not None and settings.link_target_bytes_per_s > 0:
        lack = 1 - signals.link_bytes_per_s / settings.link_target_bytes_per_s
        total += settings.link_weight * max(0.0, lack)
    if signals.prefill_wait_ms_p95 is not None:
        excess = signals.prefill_wait_ms_p95 / settings.wait_target_ms - 1
        total += settings.wait_weight * max(0.0, excess)
    if signals.decode_stalled_share is not None:
        excess = signals.decode_stalled_share / settings.stall_target - 1
        total -= settings.stall_weight * max(0.0, excess)
    return total


def _clip(value: float, limit: float) -> float:
    return max(-limit, min(limit, value))
