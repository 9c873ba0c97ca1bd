"""Configures what our processes write to their logs, one line each.

While no broker answers, aiokafka logs every attempt: thousands of lines a minute in every process.
So its messages from one place in its code pass once in a while, with a count of those left out.
"""

import logging
import math
import sys
import time
from collections.abc import Callable

_INTERVAL_S = 10.0
_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
# They log every step of every start and stop; Faust's services log as the modules of their classes.
_TALKATIVE = ("aiokafka", "faust", "mode", "streams.log.faust.app")
_REPETITIVE = "aiokafka"


class RateLimitFilter(logging.Filter):
    """Passes a library's message if none came from the same place in the last ten seconds."""

    def __init__(self, library: str, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__(library)
        self._now_s = now_s
        self._places: dict[tuple[str, int], tuple[float, int]] = {}  # last passed, left out since

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record; records of other libraries always pass."""
        if not super().filter(record):
            return True
        place = (record.pathname, record.lineno)
        now_s = self._now_s()
        logged_s, left_out = self._places.get(place, (-math.inf, 0))
        if now_s - logged_s < _INTERVAL_S:
            self._places[place] = (logged_s, left_out + 1)
            return False
        self._places[place] = (now_s, 0)
        if left_out:
            record.msg = f"{record.getMessage()} ({left_out} like it since the last one)"
            record.args = ()
        return True


def configure_logging(level: int) -> None:
    """Log to standard error from this level on; talkative libraries only from warnings on."""
    logging.basicConfig(level=level, stream=sys.stderr, format=_FORMAT)
    for library in _TALKATIVE:
        logging.getLogger(library).setLevel(max(level, logging.WARNING))
    if level > logging.DEBUG:
        for handler in logging.getLogger().handlers:
            handler.addFilter(RateLimitFilter(_REPETITIVE))
