"""Linear models of times, learned online from a stream of observations.

Theory of operation. Recursive least squares with exponential forgetting (Astrom and Wittenmark,
Adaptive Control, 2nd ed. 1995, section 2.2), on errors relative to the prediction, because times
spread in proportion. Forgetting is directional, only where an observation has information (Kulhavy,
Automatica 23, 1987), so that a stream of short prompts does not undo what was learned from long
ones. Single outliers are clipped (Huber, Robust Statistics, 1981). A two-sided cumulative sum of
the errors (Page, Biometrika 41, 1954) detects a change; then the covariance starts again, so that
the next few observations count as much as the first ones did. The prior bounds the diagonal of the
covariance.

Coefficients are at least 0: a time cannot shrink with work. Deterministic; knows nothing of
requests. `streams/core/placement/estimates.py` uses it.
"""

from collections.abc import Sequence
from operator import mul

FORGETTING = 0.99  # a memory of about 100 observations
SPREAD_MIN = 0.05  # relative errors below this are noise
CLIP = 4.0  # in units of the spread
DRIFT, ALARM = 0.75, 12.0  # of the cumulative sum, in units of the spread
SPREAD_RATE = 0.05
_TIME_MIN_MS = 1e-3


class Regression:
    """The model y = sum of coefficients * x, with coefficients of at least 0."""

    def __init__(self, assumed: Sequence[float], spread: Sequence[float]) -> None:
        """Create a model with `assumed` coefficients, whose standard deviations are `spread`."""
        self.coefficients = list(assumed)
        self.samples = 0
        self.alarms = 0
        self._spread = 1.0
        self._above = self._below = 0.0
        self._prior = [value**2 for value in spread]
        self._covariance = self._start()

    def predict(self, x: Sequence[float]) -> float:
        """Return the expected y for these features."""
        expected: float = sum(map(mul, self.coefficients, x))
        return expected

    def observe(self, x: Sequence[float], y: float) -> float:
        """Learn from one observation; return its error relative to the prediction."""
        expected = self.predict(x)
        scale = max(expected, _TIME_MIN_MS)
        relative = (y - expected) / scale
        self.samples += 1
        clipped = max(-CLIP * self._spread, min(CLIP * self._spread, relative))
        self._spread += SPREAD_RATE * (abs(clipped) * 1.25 - self._spread)
        self._spread = max(self._spread, SPREAD_MIN)
        if self._has_changed(clipped / self._spread):
            self.alarms += 1
            self._covariance = self._start()
            clipped = relative
        self._update([value / scale for value in x], clipped)
        return relative

    def _start(self) -> list[list[float]]:
        rows = range(len(self._prior))
        return [[self._prior[i] if i == j else 0.0 for j in rows] for i in rows]

    def _has_changed(self, error: float) -> bool:
        self._above = max(0.0, self._above + error - DRIFT)
        self._below = max(0.0, self._below - error - DRIFT)
        if max(self._above, self._below) < ALARM:
            return False
        self._above = self._below = 0.0
        return True

    def _update(self, x: list[float], error: float) -> None:
        covariance = self._covariance
        gain = [sum(map(mul, row, x)) for row in covariance]
        noise, variance = self._spread**2, sum(map(mul, x, gain))
        if variance <= 0.0:
            return  # the observation has no information
        retention = FORGETTING - (1 - FORGETTING) * noise / variance
        share = retention / (FORGETTING * (noise + variance))
        step = error / (noise + variance)
        for i, of_row in enumerate(gain):
            self.coefficients[i] = max(0.0, self.coefficients[i] + of_row * step)
            covariance[i] = [
                value - of_row * column_gain * share
                for value, column_gain in zip(covariance[i], gain, strict=True)
            ]
        for i, prior in enumerate(self._prior):  # equal factors for row and column: a covariance
            if covariance[i][i] > prior:
                factor = (prior / covariance[i][i]) ** 0.5
                covariance[i] = [value * factor for value in covariance[i]]
                for row in covariance:
                    row[i] *= factor
