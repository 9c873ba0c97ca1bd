"""Asks a gateway whether it would take a call; the fleet topic does not tell what it has read."""

import asyncio
import urllib.error
import urllib.request

_ANSWER_S = 5.0
_NOT_YET = 503


async def is_served(url: str) -> bool:
    """Whether the gateway at `http://host:port` says that it is ready."""
    return await asyncio.to_thread(_status, f"{url}/health/ready") not in (0, _NOT_YET)


def _status(url: str) -> int:
    """The HTTP status, 0 without an answer."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=_ANSWER_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0
