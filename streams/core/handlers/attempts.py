"""Handles reports and losses of workers, cancellations and timeouts of attempts, and takeovers.

`streams/core/states.py` says which state follows; this module does what that means for credits,
orders and estimates. Called by `streams/core/router.py` for live requests only.
"""

from collections.abc import Callable
from typing import Final

from schemas.errors import EngineFailed, RouterFailed
from schemas.records import DecisionKind, Mode, Phase, PhaseKind, Reason, Role
from streams.core.fleet.workers import DECODERS, Life
from streams.core.handlers import observations
from streams.core.handlers.endings import DEADLINE_GRACE_MS, Endings
from streams.core.handlers.orders import Orders
from streams.core.handlers.retrievals import Retrievals
from streams.core.placement.estimates import Estimates
from streams.core.requests.live import UNPLACED, LiveRequest, note, step
from streams.core.states import CANCELS, LOST, ON_WORKERS, STANDS_ON, Side, State
from streams.core.tables import RouterTables

# Routers that raise over one request before it fails: it must not stop routers for ever.
APPLY_TRIES_MAX: Final = 3
_GIVEN_UP = (PhaseKind.REFUSED, PhaseKind.FAILED)


class Attempts:
    """The transitions of placed requests, over the router's tables."""

    def __init__(
        self,
        tables: RouterTables,
        orders: Orders,
        endings: Endings,
        retrievals: Retrievals,
        estimates_of: Callable[[str], Estimates],
    ) -> None:
        self._tables = tables
        self._orders = orders
        self._endings = endings
        self._retrievals = retrievals
        self._estimates_of = estimates_of  # a model's workers

    def cancel(self, live: LiveRequest, now_ms: int) -> None:
        """End a request that no worker has; otherwise have the worker end it, and wait for that."""
        if CANCELS[live.state] is State.CANCELLING:
            self._endings.stop(live, now_ms)
        else:
            self._endings.end_cancelled(live, now_ms)

    def handle_phase(self, live: LiveRequest, phase: Phase, now_ms: int) -> None:
        """Handle a worker's report of a finished step, a refusal or a failure, unless stale."""
        keeps_kv, model = live.keeps_kv, live.request.model
        note(live, phase)
        if phase.kind is PhaseKind.KV_RECEIVED and not live.is_paired:
            # in a pair, prefill reports it
            observations.observe_transfer(self._estimates_of(model), live, phase)
        elif phase.kind is PhaseKind.KV_MISSED and (phase.worker_id, phase.worker_epoch) == (
            live.attempt.decode
        ):
            self._handle_kv_miss(live, keeps_kv=keeps_kv, now_ms=now_ms)
        following = step(live, (phase.worker_id, phase.worker_epoch), phase.kind, phase.kv)
        if following is None:
            return
        if phase.kind in _GIVEN_UP:
            self._handle_give_up(live, phase, following, now_ms)
        elif following is State.ENDED:
            self._endings.end_cancelled(live, now_ms)
        elif following is State.PAIRED and self._tables.fleet.is_lost(live.attempt.prefill, now_ms):
            self._endings.requeue(live, Reason.WORKER_LOST, None, now_ms)
        else:
            if phase.kind is PhaseKind.PREFILL_DONE:
                observations.observe_prefill(self._estimates_of(model), live, phase, now_ms)
                self._orders.refund(live, live.attempt.prefill)
            self._tables.requests.move(live, following)
            if following is State.PAIRED:  # decode has allocated blocks: now prefill may write
                self._orders.dispatch(live, now_ms)

    def _handle_kv_miss(self, live: LiveRequest, *, keeps_kv: bool, now_ms: int) -> None:
        """Handle KV that did not reach the decode worker, which now computes the prompt."""
        self._orders.decide(live, DecisionKind.COMPUTE, Reason.KV_MISSED, now_ms)
        if keeps_kv:  # no worker will fetch it
            self._orders.void_prefill(live, now_ms)

    def _handle_give_up(
        self, live: LiveRequest, phase: Phase, following: State, now_ms: int
    ) -> None:
        """Handle a worker's report that it refused the attempt or failed at it."""
        life, refused = (phase.worker_id, phase.worker_epoch), phase.kind is PhaseKind.REFUSED
        for role, charge in live.attempt.charges.items():
            if refused and charge.life == life:
                self._tables.fleet.pause(life, role)
        self._orders.refund(live, life)
        if following is State.DECODING:
            self._tables.requests.move(live, following)
            return
        missing = f"{live.request_id}: {phase.worker_id} gave no reason for {phase.kind.value}"
        error = phase.error or EngineFailed(missing).to_wire()
        if error.retriable or live.cancel is not None:
            reason = Reason.WORKER_REFUSED if refused else Reason.WORKER_FAILED
            if live.is_paired and life == live.attempt.prefill and not refused:
                reason = Reason.PEER_FAILED
            self._endings.requeue(live, reason, error, now_ms)
        else:
            self._endings.end_failed(live, Reason.REQUEST_FAILED, error, now_ms)

    def handle_worker_loss(self, live: LiveRequest, life: Life, now_ms: int) -> None:
        """Handle the loss of a worker on which the attempt stands."""
        handing_over = live.state is State.HANDING_OVER
        if step(live, life, LOST) is State.DECODING:
            self._orders.refund(live, life)
            self._tables.requests.move(live, State.DECODING)
            return
        reason = Reason.KV_PRODUCER_GONE if handing_over else Reason.WORKER_LOST
        self._endings.requeue(live, reason, None, now_ms)

    def handle_timeout(self, live: LiveRequest, now_ms: int) -> None:
        """End a request after its deadline: its worker should, the router does after a grace.
        Before the deadline, end the wait for a search or for its readers' progress."""
        if now_ms < live.request.deadline_ms:
            if live.state is State.RETRIEVING:
                self._retrievals.handle_timeout(live, now_ms)
            elif live.state is State.CONTINUING:
                self._endings.restart_late(live, now_ms)
            return
        over_ms = live.request.deadline_ms + DEADLINE_GRACE_MS
        if now_ms < over_ms and (live.state in ON_WORKERS or live.state is State.CANCELLING):
            self._tables.requests.watch(live, over_ms)
        elif live.cancel is not None:
            self._endings.end_cancelled(live, now_ms)
        else:
            self._endings.end_expired(live, now_ms)

    def adopt(self, live: LiveRequest, failed: Phase | None, now_ms: int) -> None:
        """Continue a rebuilt request: from its state if its workers live, else by a new attempt.

        The last router may have sent work of a first attempt, or of a hand-over, whose decision
        is not in the log. So no attempt number that such work may have is used again.
        """
        live.attempt.unheard = 0 if live.attempt.number else 1
        live.attempt.handed_unheard = live.state is State.HANDING_OVER
        self._tables.requests.add(live)
        self._charge_adopted(live, now_ms)
        self._retrievals.tell(live)  # the last router may not have sent the notice
        if live.attempt.number and live.state in UNPLACED:
            self._orders.void_again(live, now_ms)
        if live.failures.routers >= APPLY_TRIES_MAX:
            message = (
                f"{live.request_id}: {live.failures.routers} routers failed over it; report this"
            )
            error = RouterFailed(message).to_wire()
            self._endings.end_failed(live, Reason.ATTEMPTS_EXHAUSTED, error, now_ms)
            return
        if live.read_end is not None:
            self._endings.end_as_read(live, live.read_end, now_ms)
            return
        if live.cancel is not None:
            if failed is None and live.state in ON_WORKERS:
                self._orders.dispatch_again(live, now_ms)  # a worker can end only work that it has
            self.cancel(live, now_ms)
        elif live.state is State.RETRIEVING:
            self._retrievals.begin(live, now_ms)
        elif live.state is State.CONTINUING:
            self._endings.retry(live, now_ms)
        elif live.state is State.QUEUED:
            if live.attempt.number:
                self._endings.mark(live, live.attempt.number)  # the last router may not have
            self._tables.enqueue(live, now_ms)
        for life in live.holders:
            if life in live.holders and self._tables.fleet.is_lost(life, now_ms):
                self.handle_worker_loss(live, life, now_ms)
        if failed is not None:
            self.handle_phase(live, failed, now_ms)
        if live.state in ON_WORKERS:
            self._orders.dispatch_again(live, now_ms)
        if live.state is not State.HANDING_OVER:
            live.attempt.kv = None

    def _charge_adopted(self, live: LiveRequest, now_ms: int) -> None:
        """Spend the credits that the last router had spent on the attempt."""
        lives: list[tuple[Life, Role]] = []
        if live.state in ON_WORKERS:
            for side in STANDS_ON[live.state]:
                roles = (Role.PREFILL,) if side is Side.PREFILL else DECODERS
                lives += [(live.life_on(side), role) for role in roles]
        for life, role in lives:
            worker = self._tables.fleet.worker(life[0], role)
            if worker is not None and worker.epoch == life[1]:
                with_kv = role is not Role.PREFILL and live.attempt.mode is Mode.REMOTE
                tokens = 0 if with_kv else live.prompt_tokens
                self._orders.charge(live, worker, tokens, now_ms, now_ms)
