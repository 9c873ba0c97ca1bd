"""The wishes of a request for its placement, and how decisions report those that were not met.

A request may name a policy and an orchestration; the deployment's settings are the defaults. A
request never waits for its wish: if the wish cannot be met now, the deployment's settings place it,
and the decision names the wish and why it is unmet. `streams/core/placement/placer.py` calls this.
"""

from collections.abc import Container

from schemas.records import Mode, Request, Unmet
from streams.config import ORCHESTRATIONS, RouterSettings
from streams.core.placement.case import ALL_MET, UnmetWishes
from streams.core.placement.orchestration import OrchestrationChoice


def orchestration(settings: RouterSettings, request: Request) -> str:
    """Return the orchestration that the request wishes, or else the deployment's."""
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
    """Compare a placement with its wishes; `policies` are the names that the router has."""
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
