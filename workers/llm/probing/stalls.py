"""How much of its decode time a worker has stood still for searches lately. Pure."""

from collections import deque

from workers.llm.probing.jobs import ProbingJobs


class StalledShare:
    """A sample with each heartbeat, the share over the last `window_s`."""

    def __init__(self, probing: ProbingJobs, window_s: float) -> None:
        self._probing, self._window_s = probing, window_s
        self._decode_ms = 0.0  # of all answers together
        self._samples: deque[tuple[float, float, float, int]] = deque()

    def sample(self, now_s: float, decoding: int) -> float | None:
        """`decoding` answers are generated now. None where none of them has searched."""
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
