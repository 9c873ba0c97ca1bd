"""What workers are told about a request, and the credits that it spends with them.

A worker is told of an attempt's end in one of two ways. Void: it drops the attempt without a word,
because the router places the request again or ends it itself. Not void: it ends the request with
an outcome. Records for one worker are read in order, so a voided attempt's credit is free at once.

Decides nothing: `streams/core/handlers/dispatch.py` calls, after it has moved the request.
"""

from schemas.records import KvHandle, Mode, Orchestration, Role
from streams.core.effects import Effect
from streams.core.fleet.members import Fleet, Life, Worker
from streams.core.handlers import decisions
from streams.core.requests.live import NOBODY, Charge, Live, State

DECODERS = (Role.DECODE, Role.REPLICA)
_PREFILL, _DECODING = Role.PREFILL, State.DECODING  # looked up once


class Orders:
    """Appends dispatches to `out`; counts credits in the fleet."""

    def __init__(self, router_id: str, fleet: Fleet, out: list[Effect]) -> None:
        self._router_id = router_id
        self._fleet = fleet
        self._out = out

    def charge(self, live: Live, worker: Worker, tokens: int) -> None:
        """Spend one of a worker's credits on a request."""
        assert worker.role not in live.charges, f"{live.request_id}: charged twice"
        self._fleet.take(worker, tokens)
        live.charges[worker.role] = Charge(worker.life, tokens)

    def refund(self, live: Live, life: Life | None = None) -> None:
        """Give back the credits that a request spends, all or those with one life."""
        for role, charge in list(live.charges.items()):
            if life is None or charge.life == life:
                del live.charges[role]
                self._fleet.release(charge.life, role, charge.tokens)

    def dispatch(self, live: Live, now_ms: int, kv: KvHandle | None = None) -> None:
        """Send the work of the attempt's state. Workers ignore what they have seen before."""
        prefill, decode = self.charged(live, _PREFILL), self.charged(live, *DECODERS)
        state = live.state
        if state is _DECODING and decode is not None:
            self._send(live, decode, now_ms, kv=live.kv)
        elif state is State.PREFILLING and prefill is not None:
            self._send(live, prefill, now_ms, kv=kv)
        elif state is State.ALLOCATING and prefill is not None:
            self._send_waiting(live, decode, prefill, now_ms)
        elif state is State.PAIRED and prefill is not None and decode is not None:
            target = live.kv
            if live.orchestration is Orchestration.CONCURRENT:
                target = decisions.promised(live, decode, 0)
                self._send_waiting(live, decode, prefill, now_ms)
            self._send(live, prefill, now_ms, kv_target=target)
        live.kv = None  # used once

    def dispatch_again(self, live: Live, now_ms: int) -> None:
        """After a takeover: send what the last router may have decided and not sent.

        A hand-over of which only the decision was read, and KV that is there, prove that it has.
        """
        lives = [self._fleet.worker(c.life[0], role) for role, c in live.charges.items()]
        if live.kv_received or not all(w is not None and w.lives(now_ms) for w in lives):
            return
        if live.state is State.DECODING and live.mode is Mode.REMOTE and live.kv is None:
            return
        if live.state is not State.HANDING_OVER:
            self.dispatch(live, now_ms)

    def _send_waiting(
        self, live: Live, decode: Worker | None, prefill: Worker, now_ms: int
    ) -> None:
        """Decode of a pair: it is to wait for what prefill will write."""
        assert decode is not None
        self._send(live, decode, now_ms, kv=decisions.promised(live, prefill, live.prompt_tokens))

    def _send(
        self,
        live: Live,
        worker: Worker,
        now_ms: int,
        *,
        kv: KvHandle | None = None,
        kv_target: KvHandle | None = None,
    ) -> None:
        self._out.append(
            decisions.work(self._router_id, live, worker, now_ms, kv=kv, kv_target=kv_target)
        )

    def charged(self, live: Live, *roles: Role) -> Worker | None:
        """The worker on which the request spends a credit in one of the roles."""
        for role in roles:
            if role in live.charges:
                return self._fleet.worker(live.charges[role].life[0], role)
        return None

    def void(self, live: Live, now_ms: int) -> None:
        """Have whoever holds something of the attempt drop it, and take all credits back."""
        for role, charge in live.working.items():
            self._cancel(live, charge.life, role, now_ms, void=True)
        if live.keeps_kv:
            self.void_prefill(live, now_ms)
        self.refund(live)

    def void_prefill(self, live: Live, now_ms: int) -> None:
        """Have the prefill worker free the KV that it keeps."""
        self._cancel(live, live.prefill, Role.PREFILL, now_ms, void=True)

    def stop(self, live: Live, now_ms: int) -> None:
        """Have the last holder end the request with an outcome, and the others drop it."""
        ender = live.holders[-1]
        for role, charge in live.working.items():
            self._cancel(live, charge.life, role, now_ms, void=charge.life != ender)
        for charge in list(live.charges.values()):
            if charge.life != ender:
                self.refund(live, charge.life)
        if live.keeps_kv:
            self.void_prefill(live, now_ms)

    def _cancel(self, live: Live, life: Life, role: Role, now_ms: int, *, void: bool) -> None:
        """Cancel on one worker, if that life of it is still known."""
        if life == NOBODY or self._fleet.is_lost(life, now_ms):
            return
        worker = self._fleet.worker(life[0], role)
        if worker is not None and worker.epoch == life[1]:
            self._out.append(decisions.cancel_work(live, worker, now_ms, void=void))
