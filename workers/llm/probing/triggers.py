"""When an answer searches again, and where what was found goes into it.

A trigger is a class of a few lines. It is made for an answer with its `Probing`, asked after every
output whether to search now, and then whether the place has come. It sees the text as the engine
gives it. Requests name it by its entry point of the group `trivium.triggers`, in any installed
package: those of this module are entry points of Trivium's own.
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
TRIGGERS_MAX = 64  # a worker's registration names them all
_SENTENCE_END = re.compile(r"""(?:(?<!\d)[.!?…。！？]["'”’)\]]*\s*|\n\s*)\Z""")
_UNCERTAIN_BELOW = 0.5  # mean probability of the last tokens
LAST_TOKENS = 6


@frozen
class TriggerInput:
    """An answer so far, as triggers see it."""

    tokens: int  # since the place of the last probe, or the answer's start
    asked_tokens: int  # since the search under way was asked for
    text: str  # how the answer ends
    logprobs: Sequence[float]  # of the last tokens, where the trigger wants them


class Trigger(Protocol):
    """Decides when one answer searches, and where the passages go in."""

    wants_logprobs: bool

    def asks(self, progress: TriggerInput) -> bool:
        """Whether to search now, no search being under way."""

    def is_place(self, progress: TriggerInput) -> bool:
        """Whether what is found goes in here, a search being under way."""


class Every:
    """After so many tokens, whatever they are."""

    wants_logprobs = False

    def __init__(self, probing: Probing) -> None:
        self._every, self._ahead = probing.every, probing.lookahead

    def asks(self, progress: TriggerInput) -> bool:
        return progress.tokens >= self._every - self._ahead

    def is_place(self, progress: TriggerInput) -> bool:
        return progress.tokens >= self._every


class SentenceEnd(Every):
    """Likewise, but at the first sentence end from there on."""

    def is_place(self, progress: TriggerInput) -> bool:
        return super().is_place(progress) and _SENTENCE_END.search(progress.text) is not None


class Uncertain:
    """Where the last tokens were improbable, `lookahead` tokens later."""

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
    """A trigger whose mistakes end the probes of its answer, and nothing else."""

    def __init__(self, make: Callable[[Probing], Trigger], probing: Probing) -> None:
        self.wants_logprobs = False
        self._name = probing.trigger
        self._trigger: Trigger | None = None
        try:
            trigger = make(probing)
            self.wants_logprobs = bool(trigger.wants_logprobs)
            self._trigger = trigger
        except Exception as error:  # whatever a stranger's code does
            self._give_up(error)

    def asks(self, progress: TriggerInput) -> bool:
        """As the trigger says; never once it has failed."""
        try:
            return self._trigger is not None and bool(self._trigger.asks(progress))
        except Exception as error:
            self._give_up(error)
            return False

    def is_place(self, progress: TriggerInput) -> bool:
        """Likewise; a search under way then comes to its end here."""
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
    """All that can be loaded, by name; looked up once per process. What cannot be is logged."""
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
        except Exception as error:  # whatever a stranger's module does
            log.error("trigger %s is left out: %s: %s", point.name, type(error).__name__, error)
    return triggers


def _is_ours(point: EntryPoint) -> bool:
    """Nobody else takes a name of Trivium's own."""
    return point.dist is not None and point.dist.name == "trivium"


def trigger_of(probing: Probing) -> Trigger:
    """The trigger of the name. Gateways refuse what a decode worker has not; where it is here no
    more, or not yet, the answer searches as is usual."""
    kind = installed_triggers().get(probing.trigger)
    if kind is None:
        log.warning("trigger %s is not installed here; every is used", probing.trigger)
    return GuardedTrigger(kind or Every, probing)
