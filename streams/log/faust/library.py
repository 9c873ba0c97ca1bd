"""Imports the parts of Faust that we use, without packages that only its other parts need.

An HTTP client for its web views, crontabs for its timers and YAML as one of its formats would be
half of its import, which every router, retrieval, embedding worker and bridge pays at its start.
"""

from streams.log.stand_ins import stand_ins

with stand_ins("aiohttp", "aiohttp.client", "croniter", "croniter.croniter", "yaml"):
    import faust
    from aiohttp.client import ClientSession
    from faust._cython import streams
    from faust.app import App
    from faust.tables.manager import TableManager
    from faust.transport.drivers import aiokafka as driver
    from faust.types import TP
    from faust.utils import venusian
    from mode.utils.queues import ThrowableQueue

SASLCredentials, SSLCredentials = faust.SASLCredentials, faust.SSLCredentials

__all__ = [
    "TP",
    "App",
    "ClientSession",
    "SASLCredentials",
    "SSLCredentials",
    "TableManager",
    "ThrowableQueue",
    "driver",
    "streams",
    "venusian",
]
