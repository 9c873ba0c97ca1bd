"""The fleet view: who lives, who holds which lease, and that earlier epochs are void."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.fleet import DEAF_MS, LEASE_MS, SCALING_TARGET_MS, SILENCE_MAX_MS, FleetView
from schemas.records import (
    Grant,
    Heartbeat,
    Lease,
    Load,
    MemberKind,
    MemberState,
    Registration,
    Role,
    Wanted,
)


def registration(
    member_id: str, *, epoch: int = 1, claims: tuple[int, ...] = (), kind: str = "worker"
) -> Registration:
    return Registration(
        member_id=member_id,
        epoch=epoch,
        kind=MemberKind(kind),
        leases=tuple(Lease(topic="decode", partition=p) for p in claims),
        started_ms=0,
    )


def beat(
    member_id: str, seq: int, *, epoch: int = 1, state: str = "ready", credits: int = 0
) -> Heartbeat:
    grants = (Grant(router_id="router-1", role=Role.DECODE, credits=credits),) if credits else ()
    return Heartbeat(
        member_id=member_id,
        epoch=epoch,
        seq=seq,
        at_ms=0,
        state=MemberState(state),
        grants=grants,
        load=Load(running=seq),
    )


def folded(*records: Registration | Heartbeat, now_ms: int = 0) -> FleetView:
    view = FleetView()
    for offset, record in enumerate(records):
        view.apply(record, offset, now_ms)
    return view


def holder(view: FleetView, partition: int, now_ms: int = 0) -> str | None:
    member = view.holder("decode", partition, now_ms)
    return member.member_id if member else None


def test_registered_member_is_starting_and_alive() -> None:
    member = folded(registration("w1")).members["w1"]
    assert member.state is MemberState.STARTING and member.is_alive(LEASE_MS)
    assert not member.is_alive(LEASE_MS + 1)


def test_heartbeat_carries_state_load_and_credits() -> None:
    member = folded(registration("w1"), beat("w1", 3, credits=7)).members["w1"]
    assert member.state is MemberState.READY and member.load.running == 3
    assert member.credits == {("router-1", Role.DECODE): 7}


def test_heartbeats_extend_lease() -> None:
    view = folded(registration("w1"))
    view.apply(beat("w1", 0), 1, 2_000)
    assert view.members["w1"].is_alive(2_000 + LEASE_MS)


def test_view_ignores_repeated_heartbeats_and_unknown_members() -> None:
    view = folded(beat("w2", 0), registration("w1"), beat("w1", 5))
    view.apply(beat("w1", 5, credits=9), 3, 1_000)
    view.apply(beat("w1", 4, credits=9), 4, 1_000)
    assert list(view.members) == ["w1"]
    assert view.members["w1"].credits == {} and view.members["w1"].seen_ms == 0


def test_leaving_member_frees_its_lease_immediately() -> None:
    view = folded(registration("w1", claims=(0,)), beat("w1", 0, state="gone"))
    assert holder(view, 0) is None
    assert view.free_partitions("decode", 2, 0) == [0, 1]


def test_first_claim_by_offset_gets_lease() -> None:
    view = folded(registration("w2", claims=(0,)), registration("w1", claims=(0, 1)))
    assert (holder(view, 0), holder(view, 1)) == ("w2", "w1")
    assert view.free_partitions("decode", 3, 0) == [2]


def test_lease_ends_when_heartbeats_stop() -> None:
    view = folded(registration("w1", claims=(0,)), registration("w2", claims=(0,)))
    view.apply(beat("w2", 0), 2, LEASE_MS)
    assert holder(view, 0, LEASE_MS) == "w1"
    assert holder(view, 0, LEASE_MS + 1) == "w2"


def test_view_separates_leases_by_topic() -> None:
    view = folded(registration("w1", claims=(0,)))
    assert view.holder("prefill", 0, 0) is None


def test_new_epoch_replaces_earlier_registration() -> None:
    view = folded(
        registration("w1", claims=(0,)),
        beat("w1", 9, credits=4),
        registration("w1", epoch=2, claims=(1,)),
        beat("w1", 10),  # of the earlier epoch
        registration("w1", claims=(0,)),  # likewise
    )
    member = view.members["w1"]
    assert (member.epoch, member.beat_seq, member.credits) == (2, -1, {})
    assert member.state is MemberState.STARTING
    assert (holder(view, 0), holder(view, 1)) == (None, "w1")


def test_role_change_keeps_state_load_and_claims() -> None:
    view = folded(registration("w1", claims=(0,)), beat("w1", 2, credits=4))
    view.apply(registration("w1", claims=(0,)), 7, 0)
    member = view.members["w1"]
    assert (list(member.claims.values()), member.beat_seq, member.load.running) == ([0], 2, 2)
    assert member.state is MemberState.READY and member.credits


def test_new_claim_counts_from_its_own_offset() -> None:
    view = folded(registration("w1", claims=(0,)), registration("w2", claims=(1,)))
    view.apply(registration("w1", claims=(1,)), 2, 0)
    assert (holder(view, 0), holder(view, 1)) == (None, "w2")


def test_added_claim_keeps_offset_of_earlier_claims() -> None:
    view = folded(registration("w1", claims=(0,)), registration("w2", claims=(0, 1)))
    view.apply(registration("w1", claims=(0, 1)), 2, 0)
    assert (holder(view, 0), holder(view, 1)) == ("w1", "w2")
    view.apply(registration("w1", epoch=2, claims=(0,)), 3, 0)  # a new life claims anew
    assert holder(view, 0) == "w2"


def test_living_members_of_kind_are_sorted() -> None:
    view = folded(
        registration("w2"), registration("w1"), registration("g1", kind="gateway"),
    )  # fmt: skip
    assert [m.member_id for m in view.living(MemberKind.WORKER, 0)] == ["w1", "w2"]
    assert [m.member_id for m in view.living(MemberKind.GATEWAY, 0)] == ["g1"]
    assert list(view.living(MemberKind.WORKER, LEASE_MS + 1)) == []


def test_view_forgets_silent_members() -> None:
    view = folded(registration("w1"), registration("w2"))
    view.apply(beat("w2", 0), 2, 5_000)
    assert view.forget(9_000, 10_000) == ["w1"]
    assert list(view.members) == ["w2"]


def others_beat(view: FleetView, from_ms: int, to_ms: int) -> None:
    """Have other members beat, so that the topic is not silent."""
    for at_ms in range(from_ms, to_ms + 1, DEAF_MS):
        view.apply(beat("other", at_ms), at_ms, at_ms, at_ms)


@pytest.mark.parametrize("late", [registration("w1", claims=(0,)), beat("w1", 1)])
def test_late_record_does_not_revive_silent_member(late: Registration | Heartbeat) -> None:
    """By the broker's clock, neither a heartbeat nor a role change revives a fenced worker."""
    view = FleetView()
    assert view.apply(registration("w1", claims=(0,)), 0, 0, 10)
    assert view.apply(beat("w1", 0), 1, 0, 20)
    others_beat(view, 20, 20 + LEASE_MS)
    silent_ms = LEASE_MS + 1
    assert not view.apply(late, 2, silent_ms, 20 + silent_ms)
    assert not view.apply(beat("w1", 2), 3, silent_ms, 20 + silent_ms)
    assert view.holder("decode", 0, silent_ms) is None
    assert view.apply(registration("w1", epoch=2, claims=(0,)), 4, silent_ms, 30 + silent_ms)
    assert view.holder("decode", 0, silent_ms) is not None


@pytest.mark.parametrize("silent_ms", [4 * LEASE_MS, SILENCE_MAX_MS, SILENCE_MAX_MS + 1])
def test_leases_do_not_expire_while_log_has_no_leader(silent_ms: int) -> None:
    """Whoever joins first after a leader change takes no lease of the others."""
    view = FleetView()
    view.apply(registration("w1", claims=(0,)), 0, 0, 10)
    view.apply(beat("w1", 0), 1, 0, 20)
    stands, now_ms = silent_ms <= SILENCE_MAX_MS, 20 + silent_ms
    view.apply(registration("w2", claims=(0,)), 2, now_ms, now_ms)
    assert holder(view, 0, now_ms) == ("w1" if stands else "w2")
    others_beat(view, now_ms, now_ms + LEASE_MS)
    assert view.apply(beat("w1", 1), 9, now_ms + LEASE_MS, now_ms + LEASE_MS) is stands


def test_silence_of_topic_saves_only_members_that_return() -> None:
    view = FleetView()
    for name in ("w1", "w2"):
        view.apply(registration(name), 0, 0, 0)
        view.apply(beat(name, 0), 1, 0, 0)
    others_beat(view, 0, 2_000)
    view.apply(beat("w2", 1), 2, 2_000, 2_000)
    others_beat(view, 2_000, 2 * LEASE_MS)
    back_ms = 4 * LEASE_MS
    others_beat(view, back_ms, back_ms + LEASE_MS + DEAF_MS)
    assert not view.apply(beat("w1", 1), 8, back_ms, back_ms)
    late_ms = back_ms + LEASE_MS + DEAF_MS
    assert not view.members["w1"].is_alive(back_ms)
    assert not view.apply(beat("w2", 2), 9, late_ms, late_ms)


def test_member_may_change_roles_within_its_lease() -> None:
    view = FleetView()
    view.apply(registration("w1"), 0, 0, 10)
    view.apply(beat("w1", 0), 1, 0, 20)
    assert view.apply(registration("w1", claims=(0,)), 2, LEASE_MS, 20 + LEASE_MS)
    assert view.holder("decode", 0, LEASE_MS) is not None


def test_clock_offset_is_measured_by_fastest_heartbeat() -> None:
    view = FleetView()
    for member_id, ahead_ms in (("w1", 150), ("w2", -150)):
        view.apply(registration(member_id), 0, 0, 0)
        for seq, took_ms in enumerate((40, 3, 90)):
            heartbeat = replace(beat(member_id, seq), at_ms=500 * seq + ahead_ms)
            view.apply(heartbeat, 1, 0, 500 * seq + took_ms)
    assert {m.member_id: m.ahead_ms for m in view.members.values()} == {"w1": 147, "w2": -153}


# Properties

MEMBERS = st.sampled_from(["w1", "w2", "w3", "w4"])
CLAIMS = st.lists(st.integers(0, 2), max_size=2, unique=True).map(tuple)
REGISTRATIONS = st.builds(
    registration, MEMBERS, epoch=st.integers(1, 3), claims=CLAIMS
)  # a member may come back, claim anew, or repeat itself
BEATS = st.builds(
    beat,
    MEMBERS,
    st.integers(0, 9),
    epoch=st.integers(1, 3),
    state=st.sampled_from(["starting", "ready", "draining", "gone"]),
)
STEPS = st.lists(st.tuples(REGISTRATIONS | BEATS, st.integers(0, 2_000)), max_size=40)


@given(STEPS)
def test_views_of_one_log_agree_and_leases_are_exclusive(
    steps: list[tuple[Registration | Heartbeat, int]],
) -> None:
    first_view, second_view, now_ms = FleetView(), FleetView(), 0
    epochs: dict[str, int] = {}
    for offset, (record, wait_ms) in enumerate(steps):
        now_ms += wait_ms
        first_view.apply(record, offset, now_ms)
        second_view.apply(record, offset, now_ms)
        second_view.apply(record, offset, now_ms)  # a repeated record changes nothing
        assert all(first_view.members[m].epoch >= epoch for m, epoch in epochs.items())
        epochs = {m: v.epoch for m, v in first_view.members.items()}
        for partition in range(3):
            first_holder = first_view.holder("decode", partition, now_ms)
            second_holder = second_view.holder("decode", partition, now_ms)
            assert (first_holder and first_holder.member_id) == (
                second_holder and second_holder.member_id
            )
            _check_first_claim(first_view, partition, now_ms)


def _check_first_claim(view: FleetView, partition: int, now_ms: int) -> None:
    """The holder recomputed in another way: sort the living claims by offset."""
    claims = sorted(
        (offset, member.member_id)
        for member in view.members.values()
        if member.is_alive(now_ms)
        for lease, offset in member.claims.items()
        if lease.partition == partition
    )
    lease_holder = view.holder("decode", partition, now_ms)
    assert (lease_holder.member_id if lease_holder else None) == (claims[0][1] if claims else None)
    assert (partition in view.free_partitions("decode", 3, now_ms)) == (not claims)


def test_scaling_target_expires() -> None:
    view = FleetView()
    assert view.scaling_target_at(0) is None
    view.scaling_target = Wanted(written_by="up", at_ms=1_000, pools=())
    assert view.scaling_target_at(1_000 + 3 * SCALING_TARGET_MS) is view.scaling_target
    assert view.scaling_target_at(1_001 + 3 * SCALING_TARGET_MS) is None
