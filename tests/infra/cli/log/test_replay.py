"""`trivium replay`: options that exclude each other. What it shows is tested with whole stacks."""

from pathlib import Path

import pytest

from infra.cli.log.replay import replay
from schemas.errors import ConfigError


def test_a_prediction_has_neither_faults_nor_another_machine() -> None:
    for others in ({"kill": ["decode-0@1s"]}, {"simulated": True}, {"pools": "2P2D"}):
        with pytest.raises(ConfigError, match="--predict: expected without"):
            replay(Path("a.avro"), predict=True, **others)


def test_settings_are_names_with_values() -> None:
    with pytest.raises(ConfigError, match="--set: expected NAME=VALUE, found 'policy'"):
        replay(Path("a.avro"), changed=["policy"])
