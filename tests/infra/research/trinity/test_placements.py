"""Who gets which GPUs: sums over placements."""

from dataclasses import replace

import pytest

from infra.planning.hardware import IndexSpec
from infra.research.trinity import study
from infra.research.trinity.placements import COUPLED, IN_PLACE, KINDS, POOL, SHARED, crossing
from infra.research.trinity.rag_cluster import TrinityCase
from schemas.errors import ConfigError


def case(**changes: object) -> TrinityCase:
    """The base case at 60 requests/s."""
    base = study.base()
    busy = replace(base, traffic=replace(base.traffic, per_s=60.0))
    return replace(busy, **changes)  # type: ignore[arg-type]  # by name


def rows(count: float) -> TrinityCase:
    """With an index of so many vectors."""
    base = case()
    return replace(base, search=replace(base.search, index=IndexSpec(rows=count)))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_placements_use_about_equal_numbers_of_gpus(kind: object) -> None:
    layout = case(kind=kind).layout()
    assert 14 <= layout.gpus <= 16
    assert layout.prefill >= 1
    assert layout.decode >= 1


def test_pool_needs_one_copy_where_coupling_needs_one_per_worker() -> None:
    copies = {kind.name: case(kind=kind).layout().copies for kind in (COUPLED, SHARED, POOL)}
    assert copies == {"a, one each": 8, "a, four share": 3, "c": 1}


def test_pool_grows_with_search_load() -> None:
    heavy = replace(case().search, index=IndexSpec(width=4 * 512, top_m=128 * 512))
    assert case(kind=POOL, search=heavy).layout().copies > 1


def test_layout_refuses_index_without_room_for_kv() -> None:
    with pytest.raises(ConfigError, match="no answer fits"):
        replace(rows(60e6), kind=IN_PLACE).layout()
    with pytest.raises(ConfigError, match="placement a, one each: 16 GPUs hold no prefill and"):
        replace(rows(600e6), kind=COUPLED).layout()


def test_index_copy_takes_gpus_of_worker_that_fills_node() -> None:
    assert crossing(COUPLED, degree=8, shards=1) == 1
    assert crossing(COUPLED, degree=4, shards=1) == 0
    assert crossing(POOL, degree=8, shards=1) == crossing(IN_PLACE, degree=8, shards=1) == 0
