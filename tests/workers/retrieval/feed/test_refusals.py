"""Who buries the documents that a shard refuses."""

from schemas.fleet import FleetView
from schemas.records import (
    MemberKind,
    MemberState,
    Registration,
    Role,
    SearchCapability,
)
from workers.retrieval.feed.refusals import is_first
from workers.retrieval.settings import ShardPlace


def test_first_live_replica_writes_dead_letters_of_shard() -> None:
    view = FleetView()
    for name, shard, heard_ms in (("a", 0, 0), ("b", 0, 5_000), ("c", 0, 5_000), ("d", 1, 5_000)):
        capability = SearchCapability(shard=shard, shards=2, backend="cpu", slots=1)
        member = Registration(
            member_id=name, epoch=1, kind=MemberKind.WORKER, roles=(Role.RETRIEVAL,), started_ms=0,
            search=capability,
        )  # fmt: skip
        view.apply(member, 0, heard_ms)

    def first(now_ms: int) -> list[str]:
        places = {"a": 0, "b": 0, "c": 0, "d": 1}
        return [n for n, s in places.items() if is_first(view, ShardPlace(s, 2), n, now_ms)]

    assert first(1_000) == ["a", "d"]
    assert first(5_000) == ["a", "b", "d"], "a is lost, and does not know it"
    view.members["c"].state = MemberState.READY
    ready = [n for n in "bc" if is_first(view, ShardPlace(0, 2), n, 5_000, of_ready=True)]
    assert ready == ["b", "c"], "b still starts, and does not write snapshots"
    assert not is_first(view, ShardPlace(0, 2), "cc", 5_000, of_ready=True)
