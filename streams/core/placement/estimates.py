"""Learns the speeds of the router's workers from finished phases and requests.

Four models of times, fed only by reports of workers:
prefill on prefill workers, append-prefill on decode and replica workers, KV transfer, and decode
time per token, with the effect of append-prefill on it. The load before a phase at its placement
explains its time, so queueing is part of the models. Each worker with enough samples has a pace:
its time divided by its pool's average.

`streams/core/placement/placer.py` and `streams/core/handlers/observations.py` feed the models; the
placer reads the estimates. Shares nothing with the simulated engine's profile.
"""

from collections import OrderedDict
from collections.abc import Sequence
from math import exp
from operator import mul
from typing import TypeVar

from schemas.frozen import frozen
from schemas.records import Estimate, Role
from streams.config import ASSUMED_PREFILL_TOKENS_PER_S, ASSUMED_STEP_MS, RouterSettings
from streams.core.fleet.placement_notes import Features, PlacementNote
from streams.core.fleet.workers import Life, Numbers, Worker

FORGETTING = 0.99  # a memory of about 100 observations
SPREAD_MIN = 0.05  # relative errors below this are noise
CLIP = 4.0  # in units of the spread
DRIFT, ALARM = 0.75, 12.0  # of the cumulative sum, in units of the spread
SPREAD_RATE = 0.05
_TIME_MIN_MS = 1e-3


class Regression:
    """The model y = sum of coefficients * x, learned online; a time cannot shrink with work, so
    coefficients are at least 0.

    Theory of operation. Recursive least squares with exponential forgetting (Astrom and
    Wittenmark, Adaptive Control, 2nd ed. 1995, section 2.2), on errors relative to the prediction,
    because times spread in proportion. Forgetting is directional, only where an observation has
    information (Kulhavy, Automatica 23, 1987), so that short prompts do not undo what was learned
    from long ones. Single outliers are clipped (Huber, Robust Statistics, 1981). A two-sided
    cumulative sum of the errors (Page, Biometrika 41, 1954) detects a change; then the covariance
    starts again. The prior bounds its diagonal.
    """

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


PACES_MAX = 10_000  # the least recently updated are evicted first
PACE_SAMPLES, PACE_RATE = 8, 0.1
PACE_MIN, PACE_MAX = 0.1, 10.0
THOUSAND = 1_000.0
# Assumed until measured, as shares of the assumed speeds.
BASE_MS, TRANSFER_SHARE, SHARING_SHARE, STALL_SHARE = 1.0, 0.1, 0.02, 0.2
PAIRS_SHARE = 0.01  # of a thousand tokens' time: their attention to a thousand others
CONTEXT_SHARE = 0.002  # of a step, per thousand tokens of context that it reads
ANSWER_SHARE, ANSWER_RATE = 0.5, 0.05  # share of max_tokens that answers use
ANSWER_TOKENS_RATE = 0.01  # slow: lengths of answers differ by orders of magnitude
HOP_RATE = 0.05
PROMPTS_MEMORY_MS = 2_000.0  # time constant of the average of prompts placed on a worker
BEHIND_TIMES_MAX = 2.0  # limit of later prompts' loss, as a multiple of the time they wait for
BUSY_MAX = 0.8  # limit of a worker's share of time for prompts, and of a batch's lost share

Place = tuple[Life, Role]
Amount = TypeVar("Amount", float, Numbers)


@frozen
class PoolSpeeds:
    """Estimated times of work on an average worker of a pool."""

    prefill_base_ms: float
    prefill_ms_per_token: float
    prefill_ms_per_pair: float  # of tokens, of which one pays attention to the other
    append_base_ms: float
    append_ms_per_token: float
    append_ms_per_pair: float
    transfer_ms_per_token: float
    sharing_ms: float  # that one more running request adds to the time of every token
    context_ms_per_token: float  # likewise for each token of its context
    step_ms: float  # of an answer's token, without other requests
    answer_tokens: float  # mean length of answers; 0 until the first has ended

    def prefill_ms(self, tokens: Amount, prompt_tokens: int) -> Amount:
        """Return the prefill time of the last `tokens` of a prompt, without the base time."""
        return self.prefill_ms_per_token * tokens + self.prefill_ms_per_pair * pairs_of(
            tokens, prompt_tokens
        )

    def append_ms(self, tokens: Amount, prompt_tokens: int) -> Amount:
        """Return the time of the last `tokens` of a prompt beside a batch, without the base."""
        return self.append_ms_per_token * tokens + self.append_ms_per_pair * pairs_of(
            tokens, prompt_tokens
        )


class Estimates:
    """Models of all pools; bounded; the same observations give the same estimates."""

    def __init__(self, settings: RouterSettings) -> None:
        thousand_ms = THOUSAND * 1_000 / ASSUMED_PREFILL_TOKENS_PER_S
        step_ms = ASSUMED_STEP_MS
        # Features: thousand tokens to compute, one, thousand tokens ahead, requests ahead; million
        # pairs of tokens.
        pairs_ms = thousand_ms * PAIRS_SHARE
        self.prefill = Regression(
            (thousand_ms, BASE_MS, thousand_ms, BASE_MS, pairs_ms),
            (3 * thousand_ms, 10 * BASE_MS, 3 * thousand_ms, 10 * BASE_MS, 3 * pairs_ms),
        )
        # Features: thousand tokens to compute, one, ms of prompts ahead, running requests; million
        # pairs of tokens.
        sharing_ms = step_ms * SHARING_SHARE
        self.append = Regression(
            (thousand_ms, BASE_MS, 1.0, sharing_ms, pairs_ms),
            (3 * thousand_ms, 10 * BASE_MS, 1.0, 5 * sharing_ms, 3 * pairs_ms),
        )
        # Features: thousand tokens, one.
        moving_ms = thousand_ms * TRANSFER_SHARE
        self.transfer = Regression((moving_ms, BASE_MS), (3 * moving_ms, 10 * BASE_MS))
        # Features: one, running requests, thousand tokens of their contexts, prompt tokens appended
        # beside it per ms; of a hand-over from prefill, spread over the answer's tokens: one,
        # thousand tokens moved.
        context_ms = step_ms * CONTEXT_SHARE
        stall_ms = step_ms * thousand_ms / THOUSAND * STALL_SHARE
        self.decode = Regression(
            (step_ms, sharing_ms, context_ms, stall_ms, BASE_MS, moving_ms),
            (3 * step_ms, sharing_ms, 5 * context_ms, 5 * stall_ms, 10 * BASE_MS, 3 * moving_ms),
        )
        self._w_kv, self._samples_min = settings.w_kv, settings.samples_min
        self.hop_ms = 0.0  # of a remote placement's first token, beyond prefill
        self.answer_share = ANSWER_SHARE
        self.answer_tokens = 0.0  # mean length of answers; 0 until the first has ended
        self.changed: dict[Place, float] = {}  # paces that the fleet does not have yet
        self._paces: OrderedDict[Place, tuple[float, int]] = OrderedDict()
        self.speeds = self._speeds()

    def _speeds(self) -> PoolSpeeds:
        prefill, append = self.prefill.coefficients, self.append.coefficients
        return PoolSpeeds(
            prefill_base_ms=max(prefill[1], prefill[3]),
            prefill_ms_per_token=max(prefill[0], prefill[2]) / THOUSAND,
            prefill_ms_per_pair=prefill[4] / THOUSAND**2,
            append_base_ms=append[1],
            append_ms_per_token=append[0] / THOUSAND,
            append_ms_per_pair=append[4] / THOUSAND**2,
            transfer_ms_per_token=self.transfer.coefficients[0] / THOUSAND,
            sharing_ms=self.decode.coefficients[1],
            context_ms_per_token=self.decode.coefficients[2] / THOUSAND,
            step_ms=self.decode.coefficients[0],
            answer_tokens=self.answer_tokens,
        )

    def note_remote(
        self,
        prefill: Worker,
        decode: Worker | None,
        tokens: float,
        max_tokens: int,
        now_ms: int,
        moved_tokens: int = 0,
        prompt_tokens: int = 0,
    ) -> PlacementNote:
        """Note that a prefill worker will compute `tokens`; return the note."""
        note = PlacementNote(now_ms, max_tokens, prompt_tokens, prefill=_ahead(prefill))
        _count_placed(prefill, tokens, now_ms)
        if decode is not None:
            self.note_decode(note, decode, moved_tokens)
        return note

    def note_local(
        self,
        worker: Worker,
        tokens: float,
        max_tokens: int,
        now_ms: int,
        prompt_tokens: int = 0,
    ) -> PlacementNote:
        """Note that a worker will compute `tokens` beside its batch; return the note."""
        note = PlacementNote(now_ms, max_tokens, prompt_tokens, append=_beside(worker, now_ms))
        _count_placed(worker, tokens, now_ms)
        worker.appended_tokens += tokens
        self.note_decode(note, worker)
        return note

    def note_decode(self, note: PlacementNote, decode: Worker, moved_tokens: int = 0) -> None:
        """Note that `decode` will decode the request, after a move of `moved_tokens` of KV."""
        note.moved_tokens = moved_tokens
        note.decode, note.running = decode.life, float(decode.requests)
        note.batch_tokens = decode.batch_tokens
        note.appended_tokens = decode.appended_tokens

    def expect(
        self,
        *,
        home: Worker,
        prefill: Worker,
        append_tokens: int,
        prefill_tokens: int,
        moved_tokens: int,
        prompt_tokens: int,
        max_tokens: int,
        weights: tuple[float, float],
        now_ms: int,
    ) -> Estimate:
        """Return estimates for local and remote, with PPD's score and a price for moving KV; a
        score above 0 means local.

        The losses of other requests count as much as the prompt's own: later prompts wait behind
        it, and a local one slows the streams of its batch. A remote one waits for its KV once,
        which is spread over its own answer.
        """
        remote_ms = self.prefill.predict(_prompt(prefill_tokens, prompt_tokens, _ahead(prefill)))
        remote_ms = remote_ms * prefill.pace + self.hop_ms
        append_ms_per_token, local_ms = self._append(append_tokens, prompt_tokens, home, now_ms)
        answer_tokens = max(1.0, self.answer_share * max_tokens)
        tpot_local_ms, tpot_remote_ms = self._tpots_ms(
            home, append_tokens, moved_tokens, answer_tokens, now_ms
        )
        behind_ms = self._behind_ms(
            home, prefill, append_tokens, prefill_tokens, append_ms_per_token, now_ms
        )
        gain_ttft = (remote_ms - local_ms - behind_ms) / max(remote_ms, 1e-3)
        loss_tpot = (tpot_local_ms - tpot_remote_ms) / max(tpot_remote_ms, 1e-3)
        kv_price = self._w_kv * (moved_tokens / THOUSAND)
        return Estimate(
            ttft_local_ms=local_ms,
            ttft_remote_ms=remote_ms,
            tpot_local_ms=tpot_local_ms,
            tpot_remote_ms=tpot_remote_ms,
            score=weights[0] * gain_ttft - weights[1] * loss_tpot + kv_price,
            samples=min(self.prefill.samples, self.decode.samples),
            gain_ttft=gain_ttft,
            loss_tpot=loss_tpot,
            kv_price=kv_price,
        )

    def _behind_ms(
        self,
        home: Worker,
        prefill: Worker,
        append_tokens: int,
        prefill_tokens: int,
        append_ms_per_token: float,
        now_ms: int,
    ) -> float:
        """Return how much more time prompts behind a local one lose than those behind a remote one.

        The longer queue brings no gain, because later prompts go to the shorter one. The rate of
        prompts is known only of the last seconds, so its effect is bounded.
        """
        prefill_ms_per_token = self.prefill.coefficients[0] / THOUSAND
        local_ms = home.waiting_ms(now_ms)
        remote_ms = (prefill.work_ahead_tokens + prefill.others_tokens) * prefill_ms_per_token
        behind_ms = _behind_ms(home, append_tokens, append_ms_per_token, local_ms, now_ms)
        behind_ms -= _behind_ms(prefill, prefill_tokens, prefill_ms_per_token, remote_ms, now_ms)
        if local_ms > remote_ms:
            return max(0.0, behind_ms)
        return min(0.0, behind_ms) if local_ms < remote_ms else behind_ms

    def _tpots_ms(
        self,
        home: Worker,
        append_tokens: int,
        moved_tokens: int,
        answer_tokens: float,
        now_ms: int,
    ) -> tuple[float, float]:
        """Return the time of a token of the answer, local and remote.

        A token takes a step, and the time that prompts and other streams add to it. Streams that
        end later wait for more of both, so a delay grows by a token's time over its step alone.
        """
        *_, hand_ms, move_ms = self.decode.coefficients
        base_ms = self.token_ms(home, now_ms)
        stalled_ms = home.requests * self.stall_ms(append_tokens, base_ms)
        moving_ms = hand_ms + move_ms * (moved_tokens / THOUSAND)
        local_ms = base_ms + stalled_ms / (self.answer_tokens or answer_tokens)
        return local_ms, base_ms + moving_ms / answer_tokens

    def token_ms(self, worker: Worker, now_ms: int, requests: int = 0, tokens: int = 0) -> float:
        """Return the time of an answer's token on a worker, with `requests` more requests and
        `tokens` more tokens of context. Ignores the worker's pace, which is of prompts.
        """
        step_ms, sharing_ms, context_ms, stall_ms, *_ = self.decode.coefficients
        prompts_ms = stall_ms * _decay(worker, now_ms) * worker.token_rate
        batch_ms = context_ms * (worker.batch_tokens + tokens) / THOUSAND
        return step_ms + sharing_ms * (worker.requests + requests) + batch_ms + prompts_ms

    def stall_ms(self, append_tokens: float, token_ms: float) -> float:
        """Return the delay of each stream of a batch beside which a prompt is computed."""
        step_ms, _, _, stall_ms, *_ = self.decode.coefficients
        return stall_ms * append_tokens / max(step_ms, (1 - BUSY_MAX) * token_ms, 1e-3)

    def _append(
        self, tokens: int, prompt_tokens: int, worker: Worker, now_ms: int
    ) -> tuple[float, float]:
        """Return the time of a prompt's token beside a batch, and the time to first token.

        With too few samples, these are the times of prefill workers, after a step of the batch and
        the hops through the log.
        """
        beside, prefill = _beside(worker, now_ms), self.prefill.coefficients
        if self.append.samples < self._samples_min <= self.prefill.samples:
            alone_ms = prefill[0] * tokens / THOUSAND + prefill[1] + self.decode.coefficients[0]
            alone_ms += prefill[4] * pairs_of(float(tokens), prompt_tokens) / THOUSAND**2
            return prefill[0] / THOUSAND, (alone_ms + self.hop_ms + beside[1]) * worker.pace
        took_ms = self.append.predict(_prompt(tokens, prompt_tokens, beside)) * worker.pace
        return self.append.coefficients[0] / THOUSAND, took_ms

    def observe_prefill(
        self, note: PlacementNote, worker: Life, computed_tokens: int, took_ms: float
    ) -> None:
        """Learn from a prompt that a prefill worker has computed."""
        if note.prefill:
            note.prefill_ms = took_ms
            x = _prompt(computed_tokens, note.prompt_tokens, note.prefill)
            self._learn(self.prefill, (worker, Role.PREFILL), x, took_ms)
            self.speeds = self._speeds()

    def observe_transfer(self, tokens: int, took_ms: float) -> None:
        """Learn from a KV transfer from a prefill to a decode worker."""
        self.transfer.observe((tokens / THOUSAND, 1.0), took_ms)
        self.speeds = self._speeds()

    def observe_answer(
        self,
        note: PlacementNote,
        worker: Worker,
        *,
        computed_tokens: int,
        ttft_ms: float,
        tpot_ms: float,
        now_ms: int,
    ) -> None:
        """Learn from an answer whose first token came `ttft_ms` after its placement."""
        if note.decode != worker.life:
            return
        if note.append:
            place = (worker.life, worker.role)
            x = _prompt(computed_tokens, note.prompt_tokens, note.append)
            self._learn(self.append, place, x, ttft_ms)
        elif note.prefill_ms:
            self.hop_ms += HOP_RATE * (max(0.0, ttft_ms - note.prefill_ms) - self.hop_ms)
        appended_tokens = worker.appended_tokens - note.appended_tokens
        rate = appended_tokens / max(1, now_ms - note.at_ms)
        answer_tokens = max(1.0, (now_ms - note.at_ms - ttft_ms) / max(tpot_ms, 1e-3))
        handover_share = 0.0 if note.append else 1.0 / answer_tokens
        moved = handover_share * note.moved_tokens / THOUSAND
        running = (note.running + worker.requests) / 2
        batch = (note.batch_tokens + worker.batch_tokens) / 2 / THOUSAND
        self.decode.observe((1.0, running, batch, rate, handover_share, moved), tpot_ms)
        learning_rate = ANSWER_TOKENS_RATE if self.answer_tokens else 1.0
        self.answer_tokens += learning_rate * (answer_tokens - self.answer_tokens)
        share = min(1.0, answer_tokens / note.max_tokens)
        self.answer_share += ANSWER_RATE * (share - self.answer_share)
        self.speeds = self._speeds()

    def _learn(self, model: Regression, place: Place, x: Features, took_ms: float) -> None:
        """Update a pool's model, and the pace of one worker of it."""
        relative = took_ms / max(model.predict(x), 1e-3)
        model.observe(x, took_ms)
        pace, samples = self._paces.pop(place, (1.0, 0))
        pace += PACE_RATE * (min(PACE_MAX, max(PACE_MIN, relative)) - pace)
        self._paces[place] = pace, samples + 1
        if samples + 1 >= PACE_SAMPLES:
            self.changed[place] = pace
        if len(self._paces) > PACES_MAX:
            self._paces.popitem(last=False)


def pairs_of(tokens: Amount, prompt_tokens: int) -> Amount:
    """Return the pairs of tokens of which one pays attention to the other, when the last `tokens`
    of a prompt are computed."""
    return tokens * (prompt_tokens - tokens / 2)


def _prompt(tokens: int, prompt_tokens: int, before: Features) -> Features:
    """Return features of a prompt of which `tokens` are computed, after the load `before` it."""
    pairs = pairs_of(float(tokens), max(tokens, prompt_tokens))
    return tokens / THOUSAND, *before, pairs / THOUSAND**2


def _ahead(worker: Worker) -> Features:
    """Return features of a prefill worker's queue."""
    tokens = worker.work_ahead_tokens + worker.others_tokens
    return 1.0, tokens / THOUSAND, float(worker.requests)


def _beside(worker: Worker, now_ms: int) -> Features:
    """Return features of a decode or replica worker's batch and of the prompts before this one."""
    return 1.0, worker.waiting_ms(now_ms), float(worker.requests)


def _decay(worker: Worker, now_ms: int) -> float:
    """Return the factor by which a worker's rates have decayed since their last update."""
    return exp((worker.rates_at_ms - now_ms) / PROMPTS_MEMORY_MS)


def _count_placed(worker: Worker, tokens: float, now_ms: int) -> None:
    """Update the rates of prompts placed on a worker."""
    decay = _decay(worker, now_ms)
    worker.token_rate = worker.token_rate * decay + tokens / PROMPTS_MEMORY_MS
    worker.prompt_rate = worker.prompt_rate * decay + 1 / PROMPTS_MEMORY_MS
    worker.rates_at_ms = now_ms


def _behind_ms(
    worker: Worker, tokens: int, per_token_ms: float, waiting_ms: float, now_ms: int
) -> float:
    """Return the total extra wait of later prompts on the worker, in ms.

    Prompts that arrive before the worker is idle wait: arrivals during the prompts before this one
    wait all of this one's time, arrivals during this one half of it on average. As more prompts
    arrive meanwhile, both times are longer by 1 / (1 - the worker's busy share).
    """
    decay, per_token_ms = _decay(worker, now_ms), per_token_ms * worker.pace
    own_ms, busy = tokens * per_token_ms, worker.token_rate * decay * per_token_ms
    coming = worker.prompt_rate * decay * (waiting_ms + own_ms / 2) / (1 - min(BUSY_MAX, busy))
    return min(coming * own_ms, BEHIND_TIMES_MAX * (waiting_ms + own_ms))
