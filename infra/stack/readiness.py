"""Asks a gateway whether it would take a call; the fleet topic does not tell what it has read."""

import httpx

_ANSWER_S = 5.0


async def is_served(url: str) -> bool:
    """Whether the gateway at `http://host:port` says that it is ready."""
    try:
        async with httpx.AsyncClient(timeout=_ANSWER_S, trust_env=False, verify=False) as client:
            answer = await client.get(f"{url}/health/ready")
    except httpx.HTTPError:
        return False
    return answer.status_code != httpx.codes.SERVICE_UNAVAILABLE
