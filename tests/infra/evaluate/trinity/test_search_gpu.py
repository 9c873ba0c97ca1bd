"""A simulated search GPU obeys the real scheduler, on virtual time."""

from infra.evaluate.trinity.hardware import IndexSpec, SearchCosts
from infra.evaluate.trinity.search_gpu import PLACES, SearchGpu
from infra.simulator.log.clock import Clock
from workers.search.engine.scheduler import Drop
from workers.search.index.kinds import SearchKind
from workers.search.service.settings import RetrievalSettings

HEAVY = SearchCosts(index=IndexSpec(width=64))  # a full GPU takes longer than the floor


class Asked:
    """Searches and when they ended."""

    def __init__(self, settings: RetrievalSettings | None = None) -> None:
        self.clock = Clock()
        self.gpu = SearchGpu(self.clock, HEAVY, settings or RetrievalSettings())
        self.ended: dict[str, float] = {}
        self.refused: dict[str, Drop] = {}

    def ask(self, name: str, kind: SearchKind, deadline_ms: float = 1e9) -> None:
        def done(why: Drop | None) -> None:
            self.ended[name] = self.clock.now_ms
            if why is not None:
                self.refused[name] = why

        self.gpu.search(kind, done, deadline_ms)

    def all_ended(self, count: int) -> None:
        while len(self.ended) < count and self.clock.step():
            pass


def test_a_lone_search_takes_its_extends() -> None:
    asked = Asked()
    asked.ask("one", SearchKind.DECODE)
    asked.all_ended(1)
    assert asked.ended["one"] == HEAVY.index.extends * HEAVY.extend_ms(1)
    assert asked.gpu.busy_ms == asked.ended["one"]


def test_an_urgent_prefill_search_takes_the_place_of_a_decode_search() -> None:
    """The paper's preemption, by the scheduler that serves: all places are taken, one is parked."""
    asked = Asked()
    asked.gpu.scheduler.ms_per_extend = HEAVY.extend_ms(PLACES)  # as it has measured
    for number in range(2 * PLACES):
        asked.ask(f"d{number}", SearchKind.DECODE)
    full_ms = HEAVY.index.extends * HEAVY.extend_ms(PLACES)
    asked.clock.after(0.3 * full_ms, lambda: asked.ask("p", SearchKind.PREFILL, 1.5 * full_ms))
    asked.all_ended(2 * PLACES + 1)
    assert asked.ended["p"] < 1.5 * full_ms
    assert not asked.refused
    first = sum(ended < asked.ended["p"] for ended in asked.ended.values())
    assert first == PLACES - 1, "one decode search was parked for it, and none was lost"


def test_what_is_too_late_is_refused_and_counted() -> None:
    asked = Asked()
    asked.ask("late", SearchKind.PREFILL, deadline_ms=0.0)
    assert asked.refused == {"late": Drop.DEADLINE_PASSED}
    assert asked.gpu.dropped == 1


def test_links_of_changed_documents_are_done_when_nobody_waits() -> None:
    asked = Asked()
    for number in range(PLACES):
        asked.ask(f"link{number}", SearchKind.LINK)
    asked.ask("d", SearchKind.DECODE)
    asked.all_ended(PLACES + 1)
    links = [ended for name, ended in asked.ended.items() if name != "d"]
    assert asked.ended["d"] <= max(links)
    assert asked.gpu.search_counts[SearchKind.LINK] == PLACES
