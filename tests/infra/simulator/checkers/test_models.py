"""Simulated clusters with two models and adapters, whose workers change their models."""

from dataclasses import replace

import pytest

from infra.simulator.checkers.answers import AnswerLogChecker, ClientChecker
from infra.simulator.checkers.handles import Handles
from infra.simulator.checkers.models import ModelRecords, ModelWaits
from infra.simulator.cluster import READY_MS, Cluster
from infra.simulator.faults import losses
from infra.simulator.faults.kinds import heal
from infra.simulator.machine.latency import Setup
from infra.simulator.models import ADAPTERS, MODEL, NAMES, SECOND_MODEL, Served, TwoModels
from infra.simulator.outcomes import OneOutcome
from infra.simulator.scenarios.scenario import SHAPES
from infra.simulator.shape import ClusterShape
from infra.simulator.traffic.poisson import Profile, TurnShape, poisson
from schemas.records import OutcomeKind
from streams.config import RouterSettings

PROFILE = Profile(
    first=TurnShape(input_tokens=600, output_tokens=30),
    later=TurnShape(input_tokens=100, output_tokens=20),
    turns=4,
    think_ms=50.0,
)
DIVISIBLE = [name for name in SHAPES if name != "1P1D"]


def served(shape: str, seed: int) -> tuple[Cluster, ModelRecords]:
    """Each turn of a conversation asks for the next name; all are answered."""
    records, form = ModelRecords(), ClusterShape.parse(shape)
    cluster = Cluster(
        form,
        Setup(ack_ms=2.0, steps_max=4),
        RouterSettings(policy="replica" if shape == "3R" else "static", tick_ms=50),
        models=TwoModels(form, seed),
        keeps_log=True,
        checkers=[
            *(records, ModelWaits(), OneOutcome(), AnswerLogChecker(), ClientChecker(), Handles())
        ],
    )
    scripts = poisson(
        PROFILE,
        per_s=4.0,
        duration_ms=2_000.0,
        begin_ms=READY_MS,
        block_tokens=cluster.setup.block_tokens,
        seed=[seed],
        name="c",
    )
    for number, script in enumerate(scripts):
        names = [NAMES[(number + turn) % len(NAMES)] for turn in range(len(script.turns))]
        turns = [
            replace(turn, model=model, adapter=adapter)
            for turn, (model, adapter) in zip(script.turns, names, strict=True)
        ]
        scripts[number] = replace(script, turns=turns)
    cluster.run(scripts)
    cluster.finish()
    return cluster, records


@pytest.mark.parametrize("shape", DIVISIBLE)
def test_every_model_and_adapter_is_answered_by_its_workers(shape: str) -> None:
    cluster, records = served(shape, seed=1)
    kinds = {request.outcome.kind for request in cluster.clients.requests if request.outcome}
    assert kinds == {OutcomeKind.COMPLETED}
    assert records.counts.keys() == {*NAMES}


@pytest.mark.parametrize("shape", DIVISIBLE)
def test_workers_are_dealt_so_that_every_name_has_one_that_answers(shape: str) -> None:
    form = ClusterShape.parse(shape)
    for seed in range(20):
        models = TwoModels(form, seed)
        firsts = {name: models.first(name) for name, _ in form.roles()}
        assert {worker.model for worker in firsts.values()} == {MODEL, SECOND_MODEL}
        assert not models.settle(firsts)
    assert any(worker.adapters != ADAPTERS for worker in firsts.values())


def test_restarted_worker_may_have_other_model_until_all_faults_are_over() -> None:
    cluster, _ = served("2P2D", seed=1)
    for _ in range(9):
        for name in cluster.workers:
            losses.crash(cluster, name)
            losses.restart(cluster, name)
            decoders = [cluster.workers[worker_id] for worker_id in ("decode-0", "decode-1")]
            if len({worker.served.model for worker in decoders}) == 1:
                break
    present = {name: worker.served for name, worker in cluster.workers.items()}
    assert present["decode-0"].model == present["decode-1"].model
    heal(cluster)
    cluster.pass_ms(1_000.0)
    for name, worker in cluster.workers.items():
        assert worker.served == cluster.models.first(name)
        member = cluster.members.view.members[name].registration
        assert member.capability is not None and member.capability.model == worker.served.model


def test_served_names_are_the_model_alone_and_with_its_adapters() -> None:
    worker = Served(MODEL, ("law",), 1)
    assert [worker.answers(*name) for name in NAMES] == [True, False, True, False]
