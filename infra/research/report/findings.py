"""The findings of a whole evaluation, as a tree of dataclasses that `evaluation.py` fills."""

from dataclasses import dataclass, field

from infra.planning.grid import DURATION_MS, TIMEOUT_MS
from infra.planning.point import Point
from infra.research.paper import paper_tables
from infra.research.studies.chats import ChatChange
from infra.research.studies.interference import SlowDown
from infra.research.studies.orders import OrderComparison
from infra.research.studies.pareto import ParetoPoint
from infra.research.studies.regret import Regret
from infra.research.studies.sensitivity import SensitivityRow
from infra.research.studies.served import ServedRow
from infra.research.studies.step_change import Recovery
from infra.research.studies.thresholds import ThresholdResult
from infra.research.studies.weights import FrontierPoint, WeightResult
from infra.simulator.machine.latency import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim, its finding in words and as a number, and whether it holds."""

    what: str
    finding: str
    value: float
    target: str  # such as "<= 5"
    unit: str = ""
    holds: bool


@dataclass(slots=True, kw_only=True)
class EvaluationFindings:
    """All findings of an evaluation. Changes are in percent, times in ms, regrets are shares."""

    seed: int
    quick: bool
    setup: Setup
    runs: int = 0
    seconds: float = 0.0
    duration_ms: float = DURATION_MS
    timeout_ms: int = TIMEOUT_MS
    table_1: list[paper_tables.Table1Cell] = field(default_factory=list)
    trends: dict[str, bool] = field(default_factory=dict)
    table_2: list[paper_tables.Wins] = field(default_factory=list)
    trends_2: dict[str, bool] = field(default_factory=dict)
    leads_2: list[paper_tables.ThroughputLead] = field(default_factory=list)
    unlike_winners: float = 0.0
    table_4: list[paper_tables.Failures] = field(default_factory=list)
    first_turns: list[paper_tables.FirstTurns] = field(default_factory=list)
    chats: list[ServedRow] = field(default_factory=list)  # figure 4
    chat_changes: list[ChatChange] = field(default_factory=list)
    trends_4: dict[str, bool] = field(default_factory=dict)
    headline: list[paper_tables.Headline] = field(default_factory=list)
    interference: list[SlowDown] = field(default_factory=list)  # figures 2 and 6
    contexts: list[SlowDown] = field(default_factory=list)  # figure 7
    appends: list[tuple[int, float]] = field(default_factory=list)
    places: list[ParetoPoint] = field(default_factory=list)  # figures 1 and 8
    varied: list[SensitivityRow] = field(default_factory=list)
    orders: list[OrderComparison] = field(default_factory=list)
    tuned: list[ThresholdResult] = field(default_factory=list)
    regret: list[Regret] = field(default_factory=list)
    recovery: list[Recovery] = field(default_factory=list)
    lengths: list[ServedRow] = field(default_factory=list)  # figure 9a
    models: list[ServedRow] = field(default_factory=list)  # figure 9b
    frontier: list[FrontierPoint] = field(default_factory=list)
    weighed: list[WeightResult] = field(default_factory=list)
    traffic: list[ServedRow] = field(default_factory=list)
    traffic_skipped: str = ""
    bars: list[Claim] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
