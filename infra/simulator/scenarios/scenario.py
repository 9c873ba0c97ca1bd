"""A scenario, as a seed fixes it: workers, router settings, load, and the faults with their times.

A seed uses only some kinds of faults, since faults of many kinds hide each other. Its clients
arrive while faults strike; the `late` ones arrive after all faults have healed. Each seed is aimed
at one pair of a fault and a phase, in order, so that as many seeds as there are pairs cover all of
them. A third of the seeds has two models; these change the workers and what clients ask for, and
nothing else of a seed.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from infra.simulator.cluster import ORCHESTRATIONS, READY_MS
from infra.simulator.faults.aiming import NO_ROUTER, PHASES, PlannedFault
from infra.simulator.faults.kinds import KINDS, UNCLEAN
from infra.simulator.machine.latency import Setup
from infra.simulator.models import NAMES, SHARES, models_draw
from infra.simulator.shape import ClusterShape
from infra.simulator.traffic.poisson import unique_tokens
from infra.simulator.traffic.script import SimConversation, SimTurn, conversation
from streams.config import RouterSettings

Draw = np.random.Generator
FAULTS_MS = 3_000.0  # all faults strike within this time
HEALED_MS = READY_MS + 6_500.0  # all faults are over by then, those of leases too
SHAPES = ("2P2D", "1P3D", "2B", "1P1D2R", "1P1D", "2P1D1B", "3R")
PLAIN_SHARE = 0.88  # share of seeds without a size limit of records
RECORD_BYTES_MAX = 64 << 10
LIMITED = ("large record", "forged record")  # faults that need a log with a size limit
GRACE_MS = 1_000
LATE = "late"
PAIRS = tuple(product(KINDS, PHASES))
AIMED = 3  # number of tries of a seed's pair
MODELS_SHARE = 1 / 3  # share of seeds with two models, of those whose workers can be divided
CHANGE_SHARE = 0.2  # share of later turns that ask for another model or adapter
_AS_PAIR = ("allocating", "paired", "received")
_LEADS_TO = {
    NO_ROUTER: "router crash",
    "cancelling": "client leaves",
    "continuing": "worker drain",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A scenario of a seed; minimizing shortens `clients` and `plan` only."""

    seed: int
    shape: ClusterShape
    setup: Setup
    settings: RouterSettings
    gateways: int
    timeout_ms: int
    searches: bool
    probes: bool
    several_models: bool
    record_bytes_max: int
    clients: Sequence[SimConversation]
    late: Sequence[SimConversation]
    plan: Sequence[PlannedFault]

    def only(self, faults: Collection[int], clients: Collection[str]) -> "Scenario":
        """Return the scenario with these faults and clients only."""
        return replace(
            self,
            plan=[fault for fault in self.plan if fault.number in faults],
            clients=[client for client in self.clients if client.name in clients],
        )

    @property
    def command(self) -> str:
        """Return the command that runs this scenario again."""
        whole = draw_scenario(self.seed)
        command = f"trivium simulate --seed {self.seed}"
        if len(self.plan) < len(whole.plan):
            command += " --faults " + (",".join(str(fault.number) for fault in self.plan) or "none")
        if len(self.clients) < len(whole.clients):
            command += " --clients " + (",".join(client.name for client in self.clients) or "none")
        return command


def draw_scenario(seed: int, *, several_models: bool = True) -> Scenario:
    """Return the scenario of a seed; with one model only, if `several_models` is False."""
    draw = np.random.default_rng([seed])
    kind, phase = PAIRS[seed % len(PAIRS)]
    limited = bool(draw.random() > PLAIN_SHARE) or kind in LIMITED
    searches = bool(draw.random() < 0.4) or phase == "retrieving"
    shapes = [name for name in SHAPES if _orders(name, phase, searches=searches)]
    shape = str(draw.choice(shapes))
    setup = Setup(
        ack_ms=2.0,
        steps_max=4,
        prefill_running_max=int(draw.integers(3)),
    )
    settings = _settings(draw, shape, phase, searches=searches)
    phases = _phases(shape, settings.orchestration, searches=searches)
    plan = _plan(draw, phases, (kind, phase), limited=limited)
    # Requests wait in these phases only if no credit is free.
    waits = any(fault.phase in ("handing_over", "queued") for fault in plan)
    setup = replace(
        setup,
        decode_credits=1 if waits else int(draw.choice((1, 2, 0))),
        prefill_credits=1 if phase == "queued" else int(draw.choice((1, 2, 16))),
    )
    timeouts_ms: tuple[int, ...] = (1_200, 6_000, 20_000, 20_000)
    if any(fault.kind == UNCLEAN for fault in plan):
        timeouts_ms = timeouts_ms[:2]  # a client whose answer's end is lost waits this long
    several_models = several_models and _has_models(seed, shape, phase)
    scenario = Scenario(
        seed=seed,
        shape=ClusterShape.parse(shape),
        setup=setup,
        settings=settings,
        gateways=int(draw.integers(2, 4)),
        timeout_ms=int(draw.choice(timeouts_ms)),
        searches=searches,
        probes=searches and draw.random() < 0.5,
        several_models=several_models,
        record_bytes_max=RECORD_BYTES_MAX if limited else 0,
        clients=_clients(
            *(draw, setup, "c", 8 if phase == "queued" else int(draw.integers(3, 8)), READY_MS),
            *(FAULTS_MS / (10 if phase == "queued" else 3) if waits else 1.5 * FAULTS_MS,),
        ),
        late=_clients(draw, setup, LATE, 2, HEALED_MS, 100.0),
        plan=plan,
    )
    return _with_models(scenario) if several_models else scenario


def _has_models(seed: int, shape: str, phase: str) -> bool:
    """Return whether a seed has two models: each can answer, and the first enters the phase.
    Seeds of phases to which only another fault leads keep all their workers for one model."""
    can = shape != "1P1D" and not (shape == "2B" and phase in _AS_PAIR)
    can = can and phase not in _LEADS_TO
    return can and bool(models_draw(seed).random() < MODELS_SHARE)


def _with_models(scenario: Scenario) -> Scenario:
    """Let each conversation ask for a model or an adapter; sometimes another one between turns."""
    draw = models_draw(scenario.seed, 2)

    def with_names(client: SimConversation) -> SimConversation:
        turns = list[SimTurn]()
        for number, turn in enumerate(client.turns):
            if not number or draw.random() < CHANGE_SHARE:
                model, adapter = NAMES[int(draw.choice(len(NAMES), p=SHARES))]
            turns.append(replace(turn, model=model, adapter=adapter))
        return replace(client, turns=turns)

    clients = [with_names(client) for client in scenario.clients]
    return replace(scenario, clients=clients, late=[with_names(client) for client in scenario.late])


def _settings(draw: Draw, shape: str, phase: str, *, searches: bool) -> RouterSettings:
    policy = str(draw.choice(("static", "learned", "conditional")))
    if phase in _AS_PAIR:  # other policies may avoid pairs
        policy = "static"
    order = str(draw.choice(_orders(shape, phase, searches=searches)))
    settings = RouterSettings(
        policy="replica" if shape == "3R" else policy,
        local_share=0.3,
        orchestration=order,
        gateway_grace_ms=GRACE_MS,
        tick_ms=50,
    )
    queue_max = 10_000 if searches else int(draw.choice((2, 10_000)))
    return replace(settings, queue_requests_max=queue_max)


def _orders(shape: str, phase: str, *, searches: bool) -> list[str]:
    """Return the orchestrations with which some request enters the phase."""
    orders = [orchestration.value for orchestration in ORCHESTRATIONS]
    orders += [] if phase in _AS_PAIR else ["auto"]
    return [order for order in orders if phase in _phases(shape, order, searches=searches)]


def _phases(shape: str, orchestration: str, *, searches: bool) -> list[str]:
    """Return the phases that a request may enter. A worker of both roles forms no pair with
    itself."""
    never = set() if searches else {"retrieving"}
    if orchestration == "prefill_first":
        never |= {"allocating", "paired", "received"}
    elif orchestration != "auto":
        never |= {"allocating"} if orchestration == "concurrent" else set()
        never |= {"prefilling", "handing_over"}
    if shape == "3R":
        never |= {"prefilling", "handing_over", "allocating", "paired", "received"}
    return [phase for phase in PHASES if phase not in never]


def _plan(
    draw: Draw, phases: Sequence[str], pair: tuple[str, str], *, limited: bool
) -> list[PlannedFault]:
    kinds = [kind for kind in KINDS if limited or kind not in LIMITED]
    chosen = [str(kind) for kind in draw.choice(kinds, int(draw.integers(1, 5)), replace=False)]
    if limited:
        chosen.append(str(draw.choice(LIMITED)))
    aims = [pair] * AIMED
    aims += [(str(draw.choice(chosen)), str(draw.choice(phases))) for _ in range(draw.integers(7))]
    planned = list[tuple[float, str, str]]()
    for number, (kind, phase) in enumerate(aims):
        within_ms = FAULTS_MS / 3 if number < AIMED else FAULTS_MS
        at_ms = READY_MS + float(draw.uniform(0.0, within_ms))
        if phase in _LEADS_TO:  # no request enters these without another fault
            lead = "decoding" if number < AIMED else str(draw.choice(("queued", "decoding")))
            planned.append((at_ms, _LEADS_TO[phase], lead))
        planned.append((at_ms, kind, phase))
    return [
        PlannedFault(number=number, kind=kind, at_ms=at_ms, phase=phase)
        for number, (at_ms, kind, phase) in enumerate(sorted(planned))
    ]


def _clients(
    draw: Draw, setup: Setup, name: str, count: int, begin_ms: float, within_ms: float
) -> list[SimConversation]:
    conversations = []
    for number in range(count):
        turns, history_tokens = list[SimTurn](), 0
        for _ in range(int(draw.integers(1, 4))):
            prompt = history_tokens + int(draw.choice((100, 700, 4_000)))
            answer = int(draw.choice((1, 20, 60, 150)))
            think_ms = float(draw.exponential(100.0))
            turns.append(SimTurn(prompt_tokens=prompt, output_tokens=answer, think_ms=think_ms))
            history_tokens = prompt + answer
        at_ms = begin_ms + float(draw.uniform(0.0, within_ms))
        tokens = unique_tokens(int(draw.integers(1 << 29)), history_tokens)
        conversations.append(
            conversation(f"{name}-{number}", at_ms, turns, tokens, setup.block_tokens)
        )
    return conversations
