"""Places that tenants share."""

import pytest

from schemas.errors import TooManyRequests
from streams.calls.in_flight import FairShare


def test_fair_share_leaves_room_for_every_tenant() -> None:
    """Slow uploads of one tenant do not keep others from theirs."""
    places = FairShare(8, tenants=5)
    counts = dict.fromkeys("abcde", 0)
    for tenant in counts:
        while True:
            try:
                places.take(tenant, "uploads")
            except TooManyRequests:
                break
            counts[tenant] += 1
    assert list(counts.values()) == [4, 2, 1, 1, 0], "as long as there are more than tenants"
    with pytest.raises(TooManyRequests, match="1 of your uploads and 7 of others are under way"):
        places.check("c", "uploads")
    places.give_back("a", 4)
    assert places.used == 4 and places.limit_of("e") == 1
    places.take("e", "uploads")


def test_fair_share_admits_new_tenant_repeatedly() -> None:
    """A body comes in pieces, each of which needs room."""
    places = FairShare(64, tenants=9)
    for tenant in "ab":
        places.add(tenant, 24)
    for _ in range(4):
        places.take("c", "bytes", 2)
    with pytest.raises(TooManyRequests, match="8 of your bytes and 48 of others"):
        places.take("c", "bytes", 2)
    with pytest.raises(TooManyRequests, match="24 of your"):
        places.take("a", "bytes")
    places.take("d", "bytes", 4)


def test_fair_share_gives_single_tenant_full_limit() -> None:
    places = FairShare(8, tenants=1)
    places.take("", "answers", 8)
    with pytest.raises(TooManyRequests, match="8 of your answers and 0 of others.*at most 8 and 8"):
        places.take("", "answers")
    places.add("")  # of who must not be refused
    places.give_back("", 9)
    assert places.used == 0
