"""Triggers decide when an answer searches, and where the passages are inserted.

A trigger is a class of a few lines, created for an answer with its `Probing`. After every output it
decides whether to search now, and then whether the insertion point is reached. It gets the text as
the engine returns it. Requests name a trigger by its entry point of the group `trivium.triggers`,
in any installed package. Those in this module are entry points of Trivium itself.
"""

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol

from schemas.frozen import frozen
from schemas.records import Probing
from schemas.rules.sizes import TRIGGER_CHARS_MAX

log = logging.getLogger("trivium.worker")
GROUP = "trivium.triggers"
TRIGGERS_MAX = 64  # a worker's registration lists all of them
_SENTENCE_END = re.compile(r"""(?:(?<!\d)[.!?…。！？]["'”’)\]]*\s*|\n\s*)\Z""")
_UNCERTAIN_BELOW = 0.5  # mean probability of the last tokens
LAST_TOKENS = 6


@frozen
class TriggerInput:
    """The state of an answer, as triggers get it."""

    tokens: int  # since the last probe's insertion point, or the answer's start
    asked_tokens: int  # since the search under way was started
    text: str  # the end of the answer's text
    logprobs: Sequence[float]  # of the last tokens, if the trigger wants them


class Trigger(Protocol):
    """Decides when one answer searches, and where the passages are inserted."""

    wants_logprobs: bool

    def asks(self, progress: TriggerInput) -> bool:
        """Return whether to search now; called while no search is under way."""

    def is_place(self, progress: TriggerInput) -> bool:
        """Return whether the insertion point is here; called while a search is under way."""


class Every:
    """Inserts every `every` tokens, whatever they are."""

    wants_logprobs = False

    def __init__(self, probing: Probing) -> None:
        self._every, self._ahead = probing.every, probing.lookahead

    def asks(self, progress: TriggerInput) -> bool:
        return progress.tokens >= self._every - self._ahead

    def is_place(self, progress: TriggerInput) -> bool:
        return progress.tokens >= self._every


class SentenceEnd(Every):
    """Inserts at the first end of a sentence after `every` tokens."""

    def is_place(self, progress: TriggerInput) -> bool:
        return super().is_place(progress) and _SENTENCE_END.search(progress.text) is not None


class Uncertain:
    """Searches after improbable tokens, and inserts `lookahead` tokens later."""

    wants_logprobs = True

    def __init__(self, probing: Probing) -> None:
        self._every, self._ahead = probing.every, probing.lookahead

    def asks(self, progress: TriggerInput) -> bool:
        if progress.tokens < self._every - self._ahead or len(progress.logprobs) < LAST_TOKENS:
            return False
        return sum(map(math.exp, progress.logprobs)) / len(progress.logprobs) < _UNCERTAIN_BELOW

    def is_place(self, progress: TriggerInput) -> bool:
        return progress.asked_tokens >= self._ahead


class GuardedTrigger:
    """A trigger whose exceptions end the probes of its answer, but not the answer."""

    def __init__(self, make: Callable[[Probing], Trigger], probing: Probing) -> None:
        self.wants_logprobs = False
        self._name = probing.trigger
        self._trigger: Trigger | None = None
        try:
            trigger = make(probing)
            self.wants_logprobs = bool(trigger.wants_logprobs)
            self._trigger = trigger
        except Exception as error:  # third-party code may raise anything
            self._give_up(error)

    def asks(self, progress: TriggerInput) -> bool:
        """Return the trigger's decision; False once it has failed."""
        try:
            return self._trigger is not None and bool(self._trigger.asks(progress))
        except Exception as error:
            self._give_up(error)
            return False

    def is_place(self, progress: TriggerInput) -> bool:
        """Return the trigger's decision; True once it has failed, so that its search ends."""
        try:
            return self._trigger is None or bool(self._trigger.is_place(progress))
        except Exception as error:
            self._give_up(error)
            return True

    def _give_up(self, error: Exception) -> None:
        self._trigger = None
        log.error("trigger %s: %s: %s", self._name, type(error).__name__, error, exc_info=error)


@cache
def installed_triggers() -> Mapping[str, Callable[[Probing], Trigger]]:
    """Return the triggers that can be loaded, by name, once per process; log the others."""
    triggers: dict[str, Callable[[Probing], Trigger]] = {}
    points = sorted(entry_points(group=GROUP), key=lambda point: (not _is_ours(point), point.name))
    for point in points:
        if (
            point.name in triggers
            or len(triggers) == TRIGGERS_MAX
            or len(point.name) > TRIGGER_CHARS_MAX
        ):
            log.error(
                "trigger %s of %s: expected at most %d names of at most %d characters, each once; "
                "it is left out",
                point.name[:TRIGGER_CHARS_MAX],
                point.value,
                TRIGGERS_MAX,
                TRIGGER_CHARS_MAX,
            )
            continue
        try:
            kind = point.load()
            if not all(hasattr(kind, name) for name in ("wants_logprobs", "asks", "is_place")):
                raise TypeError("expected a class with wants_logprobs, asks and is_place")
            triggers[point.name] = kind
        except Exception as error:  # third-party modules may raise anything
            log.error("trigger %s is left out: %s: %s", point.name, type(error).__name__, error)
    return triggers


def _is_ours(point: EntryPoint) -> bool:
    """Return whether the entry point is Trivium's; other packages cannot take its names."""
    return point.dist is not None and point.dist.name == "trivium"


def trigger_of(probing: Probing) -> Trigger:
    """Return the trigger that the request names, or `Every` if it is not installed here.

    Gateways refuse names that a decode worker does not list, so that is rare.
    """
    kind = installed_triggers().get(probing.trigger)
    if kind is None:
        log.warning("trigger %s is not installed here; every is used", probing.trigger)
    return GuardedTrigger(kind or Every, probing)
