"""How a worker's capacity becomes credits: every living router gets an equal share. Pure.

`workers/presence.py` computes it for every heartbeat. A router never has more work here than its
share.
"""

from collections.abc import Iterable, Mapping

from schemas.records import Grant, Role


def divide(capacity: int, router_ids: Iterable[str]) -> dict[str, int]:
    """Equal shares; the first routers by id take the remainder, and nobody gets less than one.

    With more routers than capacity the shares add up to more than it; the bound on held requests
    catches that.
    """
    routers = sorted(set(router_ids))
    if not routers:
        return {}
    share, remainder = divmod(capacity, len(routers))
    return {
        router: max(1, share + (1 if index < remainder else 0))
        for index, router in enumerate(routers)
    }


def grants(capacities: Mapping[Role, int], router_ids: Iterable[str]) -> list[Grant]:
    """A grant for each role and router."""
    routers = list(router_ids)
    return [
        Grant(router_id=router, role=role, credits=credits)
        for role, capacity in capacities.items()
        for router, credits in divide(capacity, routers).items()
    ]
