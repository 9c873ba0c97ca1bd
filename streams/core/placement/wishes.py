"""What a request wishes of its placement, and what is said where that cannot be met.

A request may name a policy and an orchestration, else the deployment's settings hold. A wish never
makes anybody wait: what cannot be met now is placed by the deployment's settings, and the decision
names the wish and why it is unmet.
"""

from collections.abc import Container

from schemas.records import Mode, Request, Unmet
from streams.config import ORCHESTRATIONS, RouterSettings
from streams.core.placement.case import ALL_MET, UnmetWishes
from streams.core.placement.orchestration import OrchestrationChoice


def orchestration(settings: RouterSettings, request: Request) -> str:
    """The request's wish, where it is one, else the deployment's."""
    return (
        request.orchestration if request.orchestration in ORCHESTRATIONS else settings.orchestration
    )


def unmet_wishes(
    settings: RouterSettings,
    request: Request,
    policies: Container[str],
    *,
    policy: str,
    mode: Mode,
    way: OrchestrationChoice,
) -> UnmetWishes:
    """Compare a placement with its wishes; `policies` are those the router has."""
    wished_policy, wished_orchestration, unmet = "", "", Unmet.NONE
    if request.policy and request.policy != policy:
        wished_policy = request.policy
        unmet = Unmet.NO_WORKER if request.policy in policies else Unmet.UNKNOWN_POLICY
    if mode is Mode.REMOTE:
        if way.unmet is not Unmet.NONE:
            wished_orchestration, unmet = orchestration(settings, request), way.unmet
    elif request.orchestration not in ("", "auto"):
        wished_orchestration, unmet = request.orchestration, Unmet.NOT_REMOTE
    if unmet is Unmet.NONE:
        return ALL_MET
    return UnmetWishes(policy=wished_policy, orchestration=wished_orchestration, unmet=unmet)
