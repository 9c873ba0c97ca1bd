"""Measures the share of recent decode time in which a worker was stalled by searches. Pure."""

from collections import deque

from workers.llm.probing.jobs import ProbingJobs


class StalledShare:
    """The share over the last `window_s` seconds, from a sample with each heartbeat."""

    def __init__(self, probing: ProbingJobs, window_s: float) -> None:
        self._probing, self._window_s = probing, window_s
        self._decode_ms = 0.0  # of all answers together
        self._samples: deque[tuple[float, float, float, int]] = deque()

    def sample(self, now_s: float, decoding: int) -> float | None:
        """Add a sample and return the share, 0 to 1; None if no answer has searched.

        `decoding` is the number of answers that are being generated.
        """
        probing, samples = self._probing, self._samples
        if samples:
            self._decode_ms += (now_s - samples[-1][0]) * 1_000 * decoding
        samples.append((now_s, probing.stalled_ms, self._decode_ms, probing.asked_total))
        while len(samples) > 2 and now_s - samples[1][0] >= self._window_s:
            samples.popleft()
        _, stalled_ms, decode_ms, first_total = samples[0]
        if probing.asked_total == first_total and not len(probing):
            return None
        passed_ms = self._decode_ms - decode_ms
        return min(1.0, (probing.stalled_ms - stalled_ms) / passed_ms) if passed_ms else 0.0
