"""The ways that real traffic is compared on: also those of the Neuron guide, as the product's."""

import pytest

from infra.evaluate.paper.grid import WORKLOADS
from infra.evaluate.points.point import Spec, run
from infra.evaluate.studies.traffic import CONFIGS
from streams.config import POLICIES


@pytest.mark.parametrize("policy", ["pairs", "round_robin"])
def test_workers_in_turn_are_policies_of_the_product(policy: str) -> None:
    """Every turn is remote, and none is lost."""
    (config,) = (config for config in CONFIGS if config.policy == policy)
    assert policy in POLICIES and config.name == f"2P2D {policy}"
    (found,) = run(Spec(config=config, workload=WORKLOADS[0], loads_per_s=(2.0,), seed=1))
    assert (found.failed, found.local) == (0, 0)
    assert found.later > 10 and found.kv_bytes > 0
