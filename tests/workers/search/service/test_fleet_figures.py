"""What heartbeats say of KV traffic and of stalled decode time."""

from schemas.fleet import FleetView
from schemas.records import (
    Capability,
    Heartbeat,
    Load,
    MemberKind,
    MemberState,
    Registration,
    Role,
)
from workers.search.service.fleet_figures import FleetFigures, stalled_share


def beat(name: str, seq: int, at_ms: int, load: Load, epoch: int = 1) -> Heartbeat:
    state = MemberState.READY
    return Heartbeat(member_id=name, epoch=epoch, seq=seq, at_ms=at_ms, state=state, load=load)


def test_kv_per_second_is_summed_over_the_workers_that_live() -> None:
    view, figures = FleetView(), FleetFigures()

    def tell(found: Heartbeat) -> None:
        view.apply(found, 0, found.at_ms)
        figures.fold(found)

    capability = Capability(
        model="m", engine="sim", engine_id="e", block_size=16, max_model_len=9, running_max=4
    )
    for name, able in (("p", capability), ("d", capability), ("r", None)):
        registration = Registration(
            member_id=name,
            epoch=1,
            kind=MemberKind.WORKER,
            roles=(Role.DECODE,),
            started_ms=0,
            capability=able,
        )
        view.apply(registration, 0, 0)
        tell(beat(name, 1, 0, Load(kv_bytes_received=500)))
    assert figures.link_bytes_per_s(view, 0) is None
    assert stalled_share(view, 0) is None
    tell(beat("p", 2, 500, Load(kv_bytes_received=1_500, stalled_share=0.5)))
    tell(beat("d", 2, 1_000, Load(kv_bytes_received=2_500, stalled_share=0.25)))
    tell(beat("r", 2, 1_000, Load(kv_bytes_received=99_999)))
    assert figures.link_bytes_per_s(view, 1_000) == 2_000 + 2_000
    assert stalled_share(view, 1_000) == 0.375
    assert figures.link_bytes_per_s(view, 3_200) == 2_000, "p is lost"
    figures.fold(beat("d", 1, 1_500, Load(kv_bytes_received=0), epoch=2))
    assert figures.link_bytes_per_s(view, 1_500) == 2_000, "d began anew"
