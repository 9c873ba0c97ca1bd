"""Bugs in how usage is told, which storms find."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from streams.core import router
from streams.core.requests import recovery
from tests.infra.simulator.storms import weathered

# What is wrong, in which module, its lines and what stands in their place, a seed, what it finds.
BUGS = {
    "the next router tells again what is written": (
        *(recovery, "self._trace(request_id).is_told = True", "pass"),
        *(1, "told twice what it has used"),
    ),
    "what was not written is lost with its router": (
        *(router, "self._endings.tell_usage(live, outcome)", "pass"),
        *(0, "never told what they have used"),
    ),
}
REPLACED = {
    recovery: ("Rebuild", ("streams.core.router",)),
    router: ("Router", ("infra.simulator.cluster", "tests.infra.simulator.storms")),
}


@pytest.mark.parametrize("bug", BUGS)
def test_storm_finds_bug_in_usage(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, right, wrong, seed, message = BUGS[bug]
    source = Path(str(module.__file__)).read_text()
    assert source.count(right) == 1
    changed = ModuleType("core_with_a_bug")
    monkeypatch.setitem(sys.modules, changed.__name__, changed)  # for its dataclasses
    exec(source.replace(right, wrong), changed.__dict__)
    name, places = REPLACED[module]
    for place in places:
        monkeypatch.setattr(f"{place}.{name}", changed.__dict__[name])
    with pytest.raises(AssertionError, match=message):
        weathered(seed)
