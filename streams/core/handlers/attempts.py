"""What becomes of an attempt when its workers report, fail or fall silent, when the client gives
up, when time is up, and when another router takes it over.

Says which state follows; the placing and ending is `streams/core/handlers/dispatch.py`'s. Called by
`streams/core/router.py` for live requests only.
"""

from schemas.errors import EngineFailed, RouterFailed
from schemas.records import Mode, Phase, PhaseKind, Reason, Role
from streams.config import RouterSettings
from streams.core.fleet.members import Life
from streams.core.handlers import observations
from streams.core.handlers.dispatch import Dispatcher
from streams.core.handlers.orders import DECODERS
from streams.core.requests.live import Live, State
from streams.core.requests.recovery import note, step

_ON_WORKER = (State.PREFILLING, State.ALLOCATING, State.PAIRED, State.DECODING)


class Attempts:
    """The transitions of placed requests."""

    def __init__(self, dispatcher: Dispatcher, settings: RouterSettings) -> None:
        self._dispatcher = dispatcher
        self._settings = settings

    def cancel(self, live: Live, now_ms: int) -> None:
        """End what no worker holds; else have the worker end it, and wait for its word."""
        if live.state in _ON_WORKER:
            self._dispatcher.stop(live, now_ms)
        else:
            self._dispatcher.cancelled(live, now_ms)

    def reported(self, live: Live, phase: Phase, now_ms: int) -> None:
        """A worker finished a step of the attempt, or gave it up; what is stale means nothing."""
        note(live, phase)
        state = step(live, phase)
        if state is not None:
            self._advance(live, state, phase, now_ms)
        elif phase.kind is PhaseKind.KV_RECEIVED:
            if not live.is_paired:  # of a pair only prefill, who writes, can tell the time
                observations.transferred(self._dispatcher.placer, live, phase, now_ms)
        elif live.state is State.CANCELLING and phase.kind is PhaseKind.PREFILL_DONE:
            if (phase.worker_id, phase.worker_epoch) in live.holders and not live.is_paired:
                self._dispatcher.cancelled(live, now_ms)
        elif phase.kind in (PhaseKind.REFUSED, PhaseKind.FAILED):
            self._failed(live, phase, now_ms)

    def _advance(self, live: Live, state: State, phase: Phase, now_ms: int) -> None:
        """A phase takes the attempt to its next state."""
        if phase.kind is PhaseKind.KV_ALLOCATED:
            self._dispatcher.allocated(live, now_ms)
            return
        observations.prefilled(self._dispatcher.placer, live, phase, now_ms)
        self._dispatcher.orders.refund(live, live.prefill)
        self._dispatcher.table.move(live, state)

    def _failed(self, live: Live, phase: Phase, now_ms: int) -> None:
        """A worker gave the attempt up; what is stale, or about kept KV, means nothing."""
        life = phase.worker_id, phase.worker_epoch
        if life not in live.holders or live.state is State.HANDING_OVER:
            return
        refused, spare = phase.kind is PhaseKind.REFUSED, live.is_spare(life)
        for role, charge in live.charges.items():
            if refused and charge.life == life:
                self._dispatcher.fleet.pause(life, role)
        self._dispatcher.orders.refund(live, life)
        if spare:
            self._dispatcher.table.move(live, State.DECODING)
            return
        missing = f"{live.request_id}: {phase.worker_id} gave no reason for {phase.kind.value}"
        error = phase.error or EngineFailed(missing).to_wire()
        if error.retriable or live.cancel is not None:
            reason = Reason.WORKER_REFUSED if refused else Reason.WORKER_FAILED
            if live.is_paired and life == live.prefill and not refused:
                reason = Reason.PEER_FAILED
            self._dispatcher.again(live, reason, error, now_ms)
        else:
            self._dispatcher.fail(live, Reason.REQUEST_FAILED, error, now_ms)

    def lost(self, live: Live, life: Life, now_ms: int) -> None:
        """A life on which the attempt stood is over."""
        self._dispatcher.at_work = live
        if live.is_spare(life):
            self._dispatcher.orders.refund(live, life)
            self._dispatcher.table.move(live, State.DECODING)
            return
        handing = live.state is State.HANDING_OVER
        reason = Reason.KV_PRODUCER_GONE if handing else Reason.WORKER_LOST
        self._dispatcher.again(live, reason, None, now_ms)

    def overdue(self, live: Live, now_ms: int) -> None:
        """Workers end what they hold at the deadline; should one not, the router does, later."""
        self._dispatcher.at_work = live
        over_ms = live.request.deadline_ms + self._settings.deadline_grace_ms
        if live.state in (*_ON_WORKER, State.CANCELLING) and now_ms < over_ms:
            self._dispatcher.table.watch(live, over_ms)
        elif live.cancel is not None:
            self._dispatcher.cancelled(live, now_ms)
        else:
            self._dispatcher.expire(live, now_ms)

    def adopt(self, live: Live, failed: Phase | None, now_ms: int) -> None:
        """Go on with a rebuilt request: where it is if its workers live, else from the start.

        The last router may have sent work of a first attempt, or of a hand-over, whose decision
        is not in the log: so no number is used again that such work may have.
        """
        dispatcher, state = self._dispatcher, live.state
        live.unheard = 0 if live.attempt else 1
        live.handed_unheard = state is State.HANDING_OVER
        live.state = State.QUEUED
        dispatcher.at_work = live
        dispatcher.table.add(live)
        if state is not State.QUEUED:
            dispatcher.table.move(live, state)
            self._charge_adopted(live)
        if live.failed_tries >= self._settings.apply_tries_max:
            message = f"{live.request_id}: {live.failed_tries} routers failed over it; report this"
            error = RouterFailed(message).to_wire()
            dispatcher.fail(live, Reason.ATTEMPTS_EXHAUSTED, error, now_ms)
            return
        if live.cancel is not None:
            self.cancel(live, now_ms)
        elif state is State.QUEUED:
            dispatcher.enqueue(live, now_ms)
        for life in live.holders:
            if life in live.holders and dispatcher.fleet.is_lost(life, now_ms):
                self.lost(live, life, now_ms)
        if failed is not None:
            self._failed(live, failed, now_ms)
        if live.state in _ON_WORKER:
            dispatcher.orders.dispatch_again(live, now_ms)
        if live.state is not State.HANDING_OVER:
            live.kv = None

    def _charge_adopted(self, live: Live) -> None:
        roles: list[tuple[Life, Role]] = []
        if live.state in (State.PREFILLING, State.ALLOCATING, State.PAIRED):
            roles.append((live.prefill, Role.PREFILL))
        if live.state in (State.ALLOCATING, State.PAIRED, State.DECODING):
            roles += [(live.decode, role) for role in DECODERS]
        for life, role in roles:
            worker = self._dispatcher.fleet.worker(life[0], role)
            if worker is not None and worker.epoch == life[1]:
                with_kv = role is not Role.PREFILL and live.mode is Mode.REMOTE
                tokens = 0 if with_kv else live.prompt_tokens
                self._dispatcher.orders.charge(live, worker, tokens)
