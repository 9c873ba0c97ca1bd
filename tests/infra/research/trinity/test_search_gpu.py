"""A simulated search GPU obeys the real scheduler, on virtual time."""

from infra.planning.hardware import IndexSpec, SearchCosts
from infra.research.trinity.search_gpu import PLACES, SearchGpu
from infra.simulator.log.clock import Clock
from workers.retrieval.settings import RetrievalSettings
from workers.vector.engine.scheduler import Drop
from workers.vector.index.kinds import SearchKind

HEAVY = SearchCosts(index=IndexSpec(width=64))  # a full GPU takes longer than the floor


class SearchRun:
    """Searches and when they ended."""

    def __init__(self, settings: RetrievalSettings | None = None) -> None:
        self.clock = Clock()
        self.gpu = SearchGpu(self.clock, HEAVY, settings or RetrievalSettings())
        self.ended_ms: dict[str, float] = {}
        self.refused: dict[str, Drop] = {}

    def ask(self, name: str, kind: SearchKind, deadline_ms: float = 1e9) -> None:
        def on_done(why: Drop | None) -> None:
            self.ended_ms[name] = self.clock.now_ms
            if why is not None:
                self.refused[name] = why

        self.gpu.search(kind, on_done, deadline_ms)

    def all_ended(self, count: int) -> None:
        while len(self.ended_ms) < count and self.clock.step():
            pass


def test_lone_search_takes_time_of_its_extends() -> None:
    searches = SearchRun()
    searches.ask("one", SearchKind.DECODE)
    searches.all_ended(1)
    assert searches.ended_ms["one"] == HEAVY.index.extends * HEAVY.extend_ms(1)
    assert searches.gpu.busy_ms == searches.ended_ms["one"]


def test_urgent_prefill_search_preempts_decode_search() -> None:
    """The paper's preemption, by the scheduler that serves: all places are taken, one is parked."""
    searches = SearchRun()
    searches.gpu.scheduler.ms_per_extend = HEAVY.extend_ms(PLACES)  # as it has measured
    for number in range(2 * PLACES):
        searches.ask(f"d{number}", SearchKind.DECODE)
    full_ms = HEAVY.index.extends * HEAVY.extend_ms(PLACES)
    searches.clock.after(
        0.3 * full_ms, lambda: searches.ask("p", SearchKind.PREFILL, 1.5 * full_ms)
    )
    searches.all_ended(2 * PLACES + 1)
    assert searches.ended_ms["p"] < 1.5 * full_ms
    assert not searches.refused
    first = sum(ended_ms < searches.ended_ms["p"] for ended_ms in searches.ended_ms.values())
    assert first == PLACES - 1, "one decode search was parked for it, and none was lost"


def test_search_gpu_refuses_and_counts_late_search() -> None:
    searches = SearchRun()
    searches.ask("late", SearchKind.PREFILL, deadline_ms=0.0)
    assert searches.refused == {"late": Drop.DEADLINE_PASSED}
    assert searches.gpu.dropped == 1


def test_search_gpu_links_documents_after_waiting_searches() -> None:
    searches = SearchRun()
    for number in range(PLACES):
        searches.ask(f"link{number}", SearchKind.LINK)
    searches.ask("d", SearchKind.DECODE)
    searches.all_ended(PLACES + 1)
    links = [ended_ms for name, ended_ms in searches.ended_ms.items() if name != "d"]
    assert searches.ended_ms["d"] <= max(links)
    assert searches.gpu.search_counts[SearchKind.LINK] == PLACES
