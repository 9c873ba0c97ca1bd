"""Divides a worker's capacity into credits: every living router gets an equal share. Pure.

`workers/presence.py` calls it for every heartbeat. A router never has more requests on the worker
than its share.
"""

from collections.abc import Iterable, Mapping

from schemas.records import Grant, Role


def divide(capacity: int, router_ids: Iterable[str]) -> dict[str, int]:
    """Return equal shares; the first routers by id get the remainder, and each gets at least one.

    With more routers than capacity, the shares add up to more than the capacity. The worker's
    limit of active requests bounds that case.
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
    """Return a grant for each role and router."""
    routers = list(router_ids)
    return [
        Grant(router_id=router, role=role, credits=credits)
        for role, capacity in capacities.items()
        for router, credits in divide(capacity, routers).items()
    ]
