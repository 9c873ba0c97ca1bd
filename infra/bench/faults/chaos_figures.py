"""Figures, tables and bars of the chaos run, from what clients saw and the log says. Pure."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from infra.bench.faults.conversation_load import Talks, wrong
from infra.bench.faults.http_clients import WHOLE, Plain, Resuming
from infra.bench.faults.kill_schedule import FREEZE, KILL
from infra.bench.faults.log_audit import Audit
from infra.bench.results import Bar, at_most, percentiles
from infra.stack.engine_alone import LoneAnswer
from schemas.records import OutcomeKind
from schemas.rules.outcomes import counting

_NAMED_MAX = 40  # of a kind, in the report
_FINE = {OutcomeKind.COMPLETED, OutcomeKind.CANCELLED}  # the latter: its caller hung up


@dataclass(kw_only=True)
class ChaosRun:
    """What one run found."""

    talks: Talks
    dealt: Counter[tuple[str, str]]
    missed: int
    states: Mapping[str, str]  # at the end
    back_s: float  # until all processes were ready after the last blow
    restarts: Mapping[str, int]
    audit: Audit = field(default_factory=lambda: Audit({}, {}, {}, {}, []))
    expected: Mapping[str, LoneAnswer] = field(default_factory=dict)

    def lost(self) -> dict[str, str]:
        """Accepted requests that nobody answered, each with how it ended."""
        lost = {}
        for request_id in self.audit.requests:
            outcome = counting(self.audit.outcomes.get(request_id, ()))
            if outcome is None:
                lost[request_id] = "no outcome"
            elif outcome.kind not in _FINE:
                error = outcome.error
                lost[request_id] = f"{outcome.kind}: {error.message if error else ''}"
        return lost

    def wrong(self) -> list[str]:
        """Answers that are not what one engine alone says."""
        return wrong(self.talks.seen, self.expected)

    def unanswered(self) -> list[str]:
        """Questions of resuming clients that did not end with a whole answer."""
        return [
            f"{seen.request_id or 'no request'}: {seen.ended}: {seen.detail}"
            for seen in self.talks.seen
            if seen.client == Resuming.name and seen.ended != WHOLE
        ]

    def away(self) -> dict[str, str]:
        """Processes that did not come back."""
        return {name: state for name, state in self.states.items() if state != "ready"}


def bars(run: ChaosRun) -> list[Bar]:
    """What must hold whatever dies."""
    violations = list(run.audit.violations())
    never_ended = run.talks.under_way
    return [
        at_most("accepted requests lost", len(run.lost()), 0, ""),
        at_most("wrong answers", len(run.wrong()), 0, ""),
        at_most("resuming clients not answered", len(run.unanswered()) + never_ended, 0, ""),
        at_most("violations of the log's rules", len(violations), 0, ""),
        at_most("processes not back", len(run.away()), 0, ""),
    ]


def figures(run: ChaosRun) -> dict[str, Any]:
    """All of it, for the report."""
    found: dict[str, Any] = {
        "requests_accepted": len(run.audit.requests),
        "outcomes": dict(run.audit.kinds()),
        "answer_tokens": sum(len(answer.token_ids) for answer in run.expected.values()),
        "clients": {kind: dict(counts) for kind, counts in run.talks.counts().items()},
        "never_ended": run.talks.under_way,
        "kills": _by_name(run.dealt, KILL),
        "freezes": _by_name(run.dealt, FREEZE),
        "blows_missed": run.missed,
        "restarts": dict(run.restarts),
        "ended_by_themselves": _own_ends(run),
        "back_s": round(run.back_s, 1),
        "not_back": run.away(),
        "longest_pause_s": {
            kind: percentiles(_pauses(run, kind)) for kind in (Plain.name, Resuming.name)
        },
        "resumes": sum(seen.resumes for seen in run.talks.seen),
        "lost": dict(list(run.lost().items())[:_NAMED_MAX]),
        "wrong": run.wrong()[:_NAMED_MAX],
        "not_answered": run.unanswered()[:_NAMED_MAX],
        "violations": list(run.audit.violations())[:_NAMED_MAX],
        "plain_clients_saw": dict(_details(run).most_common(_NAMED_MAX)),
    }
    return found


def _by_name(dealt: Counter[tuple[str, str]], how: str) -> dict[str, int]:
    return {name: count for (name, dealt_how), count in sorted(dealt.items()) if dealt_how == how}


def _own_ends(run: ChaosRun) -> dict[str, int]:
    """Ends of processes that nobody killed: of leases lost while frozen, or of a mistake."""
    by_themselves = {name: n - run.dealt[name, KILL] for name, n in run.restarts.items()}
    return {name: count for name, count in by_themselves.items() if count}


def _pauses(run: ChaosRun, client: str) -> list[float]:
    return [s.pause_s for s in run.talks.seen if s.client == client and s.ended == WHOLE]


def _details(run: ChaosRun) -> Counter[str]:
    return Counter(
        f"{seen.ended}: {seen.detail}"
        for seen in run.talks.seen
        if seen.client == Plain.name and seen.ended != WHOLE
    )


def show(run: ChaosRun, console: Console) -> None:
    """The tables."""
    table = Table("process", "killed", "frozen", "ended by itself", "now", title="Processes")
    own = _own_ends(run)
    for name in dict.fromkeys([*run.restarts, *(name for name, _ in run.dealt)]):
        row = (run.dealt[name, KILL], run.dealt[name, FREEZE], own.get(name, 0))
        table.add_row(name, *(str(count or "") for count in row), run.states.get(name, ""))
    console.print(table)
    table = Table("clients", "ended", "answers", title="What clients saw")
    for kind, counts in sorted(run.talks.counts().items()):
        for ended, count in counts.most_common():
            table.add_row(kind, ended, str(count))
        table.add_section()
    console.print(table)
    for title, lines in (
        ("Lost", [f"{request_id}: {how}" for request_id, how in run.lost().items()]),
        ("Wrong", run.wrong()),
        ("Not answered", run.unanswered()),
        ("Against the rules", list(run.audit.violations())),
    ):
        for line in lines[:5]:
            console.print(f"{title}: {line}", markup=False, soft_wrap=True)
