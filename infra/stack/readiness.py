"""Asks a gateway whether it would take a call; the fleet topic does not tell what it has read.

Without an HTTP client: to import one would be a quarter of the launcher's start.
"""

import asyncio
from http import HTTPStatus
from urllib.parse import urlsplit

_ANSWER_S = 5.0


async def is_served(url: str) -> bool:
    """Whether the gateway at `http://host:port` says that it is ready."""
    place = urlsplit(url)
    request = f"GET /health/ready HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n\r\n"
    try:
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
            try:
                writer.write(request.encode())
                status = int((await reader.readline()).split()[1])
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError, IndexError):
        return False
    return status != HTTPStatus.SERVICE_UNAVAILABLE
