"""The ways that real traffic is compared on: also those of the Neuron guide, as the product's."""

import pytest

from infra.planning.grid import WORKLOADS
from infra.planning.point import Spec, run
from infra.research.studies.traffic import CONFIGS
from streams.config import POLICIES


@pytest.mark.parametrize("policy", ["pairs", "round_robin"])
def test_rotation_policies_exist_in_product(policy: str) -> None:
    """Every turn is remote, and none is lost."""
    (config,) = (config for config in CONFIGS if config.policy == policy)
    assert policy in POLICIES and config.name == f"2P2D {policy}"
    (result,) = run(Spec(config=config, workload=WORKLOADS[0], loads_per_s=(2.0,), seed=1))
    assert (result.failed, result.local) == (0, 0)
    assert result.later > 10 and result.kv_bytes > 0
