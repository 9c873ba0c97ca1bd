"""The parts of uvicorn that the gateway uses, without its command line and its reloader."""

from streams.log.stand_ins import stand_ins

with stand_ins("uvicorn.main"):
    from uvicorn.config import Config
    from uvicorn.protocols.http.httptools_impl import (
        STATUS_LINE,
        HttpToolsProtocol,
        RequestResponseCycle,
    )
    from uvicorn.server import Server

__all__ = ["STATUS_LINE", "Config", "HttpToolsProtocol", "RequestResponseCycle", "Server"]
