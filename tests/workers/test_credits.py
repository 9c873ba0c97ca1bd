"""How a worker's capacity is shared among routers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.records import Grant, Role
from workers.credits import divide, grants


@pytest.mark.parametrize(
    ("capacity", "routers", "shares"),
    [
        (8, [], {}),
        (8, ["a"], {"a": 8}),
        (8, ["b", "a"], {"a": 4, "b": 4}),
        (8, ["c", "b", "a"], {"a": 3, "b": 3, "c": 2}),
        (8, ["a", "a", "b"], {"a": 4, "b": 4}),
        (1, ["a", "b", "c"], {"a": 1, "b": 1, "c": 1}),
    ],
)
def test_credits_are_divided_between_routers(
    capacity: int, routers: list[str], shares: dict[str, int]
) -> None:
    assert divide(capacity, routers) == shares


@given(st.integers(1, 500), st.sets(st.text("abc", min_size=1, max_size=3), min_size=1))
def test_credits_use_capacity_and_differ_by_one_at_most(capacity: int, routers: set[str]) -> None:
    shares = divide(capacity, routers)
    assert set(shares) == routers
    assert min(shares.values()) >= 1
    assert max(shares.values()) - min(shares.values()) <= 1
    assert sum(shares.values()) == max(capacity, len(routers))


def test_grants_cover_every_role_and_router() -> None:
    all_grants = grants({Role.PREFILL: 2, Role.DECODE: 5}, ["b", "a"])
    assert all_grants == [
        Grant(router_id="a", role=Role.PREFILL, credits=1),
        Grant(router_id="b", role=Role.PREFILL, credits=1),
        Grant(router_id="a", role=Role.DECODE, credits=3),
        Grant(router_id="b", role=Role.DECODE, credits=2),
    ]
