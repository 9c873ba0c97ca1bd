"""`trivium replay`: options that exclude each other. What it shows is tested with whole stacks."""

from pathlib import Path

import pytest

from infra.cli.log.replay import replay
from schemas.errors import ConfigError


def test_prediction_rejects_faults_pools_and_simulation() -> None:
    for options in ({"kill": ["decode-0@1s"]}, {"simulated": True}, {"pools": "2P2D"}):
        with pytest.raises(ConfigError, match="--predict: expected without"):
            replay(Path("a.avro"), predict=True, **options)


def test_replay_setting_requires_name_and_value() -> None:
    with pytest.raises(ConfigError, match="--set: expected NAME=VALUE, found 'policy'"):
        replay(Path("a.avro"), changed=["policy"])
