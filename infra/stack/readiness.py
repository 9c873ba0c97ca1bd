"""Asks a gateway whether it would accept a call: the fleet topic does not show what it has read.

It uses no HTTP client: importing one would take a quarter of the launcher's start.
"""

import asyncio
from http import HTTPStatus
from urllib.parse import urlsplit

_ANSWER_S = 5.0


async def is_served(url: str) -> bool:
    """Return whether the gateway at `http://host:port` reports that it is ready."""
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
