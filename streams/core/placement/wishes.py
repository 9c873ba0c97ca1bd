"""What a request wishes of its placement, and what is said where that cannot be met.

A request may name a policy and an orchestration, else the deployment's settings hold. A wish never
makes anybody wait: what cannot be met now is placed by the deployment's settings, and the decision
names the wish and why it is unmet.
"""

from collections.abc import Container

from schemas.records import Mode, Request, Unmet
from streams.config import ORCHESTRATIONS, RouterSettings
from streams.core.placement.case import ALL_MET, Missed
from streams.core.placement.orchestration import Way


def orchestration(settings: RouterSettings, request: Request) -> str:
    """The request's wish, where it is one, else the deployment's."""
    return (
        request.orchestration if request.orchestration in ORCHESTRATIONS else settings.orchestration
    )


def missed(
    settings: RouterSettings,
    request: Request,
    known: Container[str],
    *,
    policy: str,
    mode: Mode,
    way: Way,
) -> Missed:
    """Compare a placement with what was wished; `known` are the policies that the router has."""
    wished_policy, wished, unmet = "", "", Unmet.NONE
    if request.policy and request.policy != policy:
        wished_policy = request.policy
        unmet = Unmet.NO_WORKER if request.policy in known else Unmet.UNKNOWN_POLICY
    if mode is Mode.REMOTE:
        if way.unmet is not Unmet.NONE:
            wished, unmet = orchestration(settings, request), way.unmet
    elif request.orchestration not in ("", "auto"):
        wished, unmet = request.orchestration, Unmet.NOT_REMOTE
    if unmet is Unmet.NONE:
        return ALL_MET
    return Missed(policy=wished_policy, orchestration=wished, unmet=unmet)
