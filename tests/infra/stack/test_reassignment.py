"""Which workers can be moved from pool to pool."""

from dataclasses import replace

import pytest

from infra.stack.reassignment import find_worker
from schemas.errors import ConfigError
from schemas.log.clock import wall_ms
from schemas.records import (
    Role,
)
from tests.infra.watched_fleet import fleet
from tests.streams.builders import registration


def test_only_workers_with_a_language_model_can_be_moved() -> None:
    watch = fleet()
    search = replace(registration("search-0", Role.DECODE, partition=7), roles=[Role.RETRIEVAL])
    watch.view.apply(search, 100, wall_ms())
    embeds = replace(registration("embed-0", Role.DECODE, partition=7), roles=[Role.EMBEDDING])
    watch.view.apply(embeds, 101, wall_ms())
    assert find_worker(watch, "both-0").member_id == "both-0"
    with pytest.raises(
        ConfigError, match="no worker 'x' lives; expected one of: both-0, embed-0, prefill"
    ):
        find_worker(watch, "x")
    with pytest.raises(ConfigError, match="search-0 serves retrieval; expected a worker with a"):
        find_worker(watch, "search-0")
    with pytest.raises(ConfigError, match="embed-0 serves embedding; expected a worker with a"):
        find_worker(watch, "embed-0")
