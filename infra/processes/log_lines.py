"""What our processes write to their logs, one line each.

While no broker answers, aiokafka tells of every try: thousands of lines a minute in every process.
So what it says from one place in its code is told once in a while, with the count of the others.
"""

import logging
import math
import sys
import time
from collections.abc import Callable

_INTERVAL_S = 10.0
_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
# They tell every step of every start and stop; Faust's services by the modules of their classes.
_TALKATIVE = ("aiokafka", "faust", "mode", "schemas.log.faust.app")
_REPETITIVE = "aiokafka"


class RateLimitFilter(logging.Filter):
    """Lets a library's message through if none came from the same place in the last ten seconds."""

    def __init__(self, library: str, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__(library)
        self._now_s = now_s
        self._places: dict[tuple[str, int], tuple[float, int]] = {}  # last told, left out since

    def filter(self, record: logging.LogRecord) -> bool:
        """True where the record is to be told; all of other libraries are."""
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
    """Log from this level on to standard error, and libraries' news from warnings on."""
    logging.basicConfig(level=level, stream=sys.stderr, format=_FORMAT)
    for library in _TALKATIVE:
        logging.getLogger(library).setLevel(max(level, logging.WARNING))
    if level > logging.DEBUG:
        for handler in logging.getLogger().handlers:
            handler.addFilter(RateLimitFilter(_REPETITIVE))
