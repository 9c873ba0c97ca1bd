"""Deliberate bugs, put into the code that runs for the length of a test.

Each is text of a module and what stands in its place. Whoever has imported the class that is there
gets the wrong one instead.
"""

import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest


@dataclass(frozen=True, slots=True)
class Bug:
    """Name a bug; `finds` is the message of a checker, or of another that is first."""

    module: str
    of: str  # a class or function of the module
    right: str
    wrong: str
    finds: str
    first: int = 0  # seeds before that do not find it, which is a test of a minute (`make bugs`)

    def put_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Patch the bug into the modules that use the class, until the test ends."""
        module = import_module(self.module)
        source = Path(str(module.__file__)).read_text()
        assert source.count(self.right) == 1, f"{self.module}: changed; change this bug too"
        changed = ModuleType(f"{self.module}_with_a_bug")
        monkeypatch.setitem(sys.modules, changed.__name__, changed)  # for its dataclasses
        exec(source.replace(self.right, self.wrong), changed.__dict__)
        right, wrong = module.__dict__[self.of], changed.__dict__[self.of]
        for name, loaded in list(sys.modules.items()):
            if name.startswith(("streams.", "workers.", "infra.")) and loaded is not changed:
                if loaded.__dict__.get(self.of) is right:
                    monkeypatch.setattr(loaded, self.of, wrong)


_ATTEMPTS = ("streams.core.handlers.attempts", "Attempts")
_ACTIVE_REQUESTS = ("workers.llm.active_requests", "ActiveRequests")
_RECOVERY = ("streams.core.requests.recovery", "Rebuild")
_DISPATCH = ("streams.core.handlers.dispatch", "Dispatcher")
_ROUTER = ("streams.core.router", "Router")

# Of the first four, each was once real.
BUGS = {
    "work without decision: its number is used again": Bug(
        *_ATTEMPTS,
        "live.attempt.unheard = 0 if live.attempt.number else 1",
        *("live.attempt.unheard = 0", "is given to"),
    ),
    "two outcomes: a router ends an attempt that its worker ends too": Bug(
        *("streams.core.handlers.orders", "outcome_of"),
        *(
            "attempt=live.next_attempt,\n        kind=kind,",
            "attempt=live.attempt.number,\n        kind=kind,",
        ),
        "two outcomes or told of, and nobody asked",
    ),
    "late outcome: one of an attempt that is void ends the request": Bug(
        *_ROUTER,
        "if live is None or outcome.attempt < live.attempt.number:",
        *("if live is None:", "void or the log tells"),
    ),
    "sleeping router: it goes on writing when another has taken over": Bug(
        *("infra.simulator.members.router", "SimRouter"),
        *("writes_only_while_leased = True", "writes_only_while_leased = False"),
        "after attempt",
    ),
    "work that comes twice is begun twice": Bug(
        *_ACTIVE_REQUESTS,
        "if not self.is_addressed_here(work) or not self._is_new(work):",
        *("if not self.is_addressed_here(work):", "over"),
    ),
    "a hand-over does not wait for its token": Bug(
        *_ACTIVE_REQUESTS,
        "stream.columns.report(record, stream.headers)",
        *("self._report(record, stream.headers)", "handed over before its token is in the log"),
        first=180,
    ),
    "a void order is answered": Bug(
        *_ACTIVE_REQUESTS,
        "if stream.ends_request and not order.void:",
        *("if stream.ends_request:", "cancelled, and nobody asked for it"),
    ),
    "what was told of usage is told again": Bug(
        *_RECOVERY, "self._trace(request_id).is_told = True", "pass", "told twice what it has used"
    ),
    "a request waits for a search that nobody answers": Bug(
        *_ATTEMPTS, "self._retrievals.handle_timeout(live, now_ms)", "pass", "not served"
    ),
    "an end does not free its credits": Bug(
        *("streams.core.handlers.endings", "Endings"),
        *("self._orders.refund(live)\n        tables", "tables", "not served"),
    ),
    "a model whose requests wait delays the next one": Bug(
        *_DISPATCH,
        "self._place_waiting(queue, now_ms)",
        "self._place_waiting(queue, now_ms)\n            if queue.waiting:\n                break",
        "beside idle workers",
    ),
    "work with an adapter goes to any worker": Bug(
        *("streams.core.placement.selection", "View"),
        "return self._able(pool, pool.open(self.now_ms))",
        *("return pool.open(self.now_ms)", "which can load"),
    ),
}
