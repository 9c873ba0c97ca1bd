"""Which workers, mode and orchestration a request gets, case by case."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ConfigError
from schemas.fleet import LEASE_MS
from schemas.records import MemberState, Mode, Orchestration, Priority, Reason, Role, Unmet
from streams.config import RouterSettings
from streams.core.placement import orchestration, selection
from streams.core.placement.ppd_table import PpdTable
from tests.streams import builders
from tests.streams.core.placement.placer_fixture import ALL, PlacerFixture, case, pair, session

EMPTY = PpdTable({"context_tokens": [1], "new_tokens": [1], "answer_tokens": [1], "load": [1]}, [])


def test_the_first_turn_is_remote_unless_the_policy_is_asked_and_says_otherwise() -> None:
    for policy in ("learned", "table", "static"):
        scene = pair(policy=policy, local_share=1.0, table=EMPTY)
        found = scene.place(case())
        assert found is not None
        assert (found.mode, found.reason, found.policy) == (Mode.REMOTE, Reason.FIRST_TURN, policy)
        own = Reason.TOO_LITTLE_KNOWN if policy == "learned" else Reason.UNKNOWN
        assert found.policy_reason is own


@pytest.mark.parametrize(("context", "held"), [(0, 0), (16, 0), (17, 16), (1_000, 992)])
def test_a_history_is_held_in_whole_blocks_but_for_its_last_token(context: int, held: int) -> None:
    scene = pair(policy="static", local_share=1.0)
    found = scene.place(case(2_000, session("d0", context)))
    assert found is not None
    assert found.decode_cached_tokens == held


def test_what_is_moved_has_a_price_wherever_the_history_lies() -> None:
    modes = {}
    for w_kv in (0.0, 50.0):
        scene = pair(decodes=2, policy="learned", samples_min=0, explore_share=0.0, w_kv=w_kv)
        scene.fleet.occupy(scene.worker("d1"), scene.now_ms + 60_000, 0.1)
        for known in (None, session("d9"), session("d0", 16)):
            scene.fleet.occupy(scene.worker("d0"), scene.now_ms + 1_000, 0.1)
            found = scene.take(case(1_000, known))
            assert found.estimate is not None
            assert found.decode is scene.worker("d0") or found.mode is Mode.REMOTE
            modes[w_kv, known and known.decode_worker] = found.mode, found.reason
    local = (Mode.LOCAL, Reason.LEARNED)
    assert [modes[50.0, on] for on in (None, "d9", "d0")] == [local] * 3
    assert [modes[0.0, on] for on in (None, "d9", "d0")] == [
        (Mode.REMOTE, Reason.FIRST_TURN),
        (Mode.REMOTE, Reason.SESSION_WORKER_GONE),
        (Mode.REMOTE, Reason.LEARNED),
    ]


def test_local_first_turns_are_no_herd() -> None:
    scene = pair(decodes=3, window=100, policy="learned", samples_min=0, w_kv=50.0)
    names = []
    for _ in range(12):
        found = scene.take(case(100))
        assert found.mode is Mode.LOCAL and found.decode is not None
        names.append(found.decode.worker_id)
        scene.pass_ms(1_000)  # computed by then
    assert [names.count(name) for name in ("d0", "d1", "d2")] == [4, 4, 4]


def test_a_full_session_worker_sends_a_local_turn_elsewhere() -> None:
    scene = pair(decodes=2, policy="static", local_share=1.0)
    scene.beat(d0=0)
    found = scene.place(case(session=session("d0")))
    assert found is not None
    assert (found.mode, found.reason) == (Mode.REMOTE, Reason.SESSION_WORKER_FULL)
    assert found.policy_reason is Reason.FIXED_SHARE
    assert found.decode is scene.worker("d1")


@pytest.mark.parametrize("why", ["gone", "epoch", "silent"])
def test_a_session_without_its_worker_begins_again(why: str) -> None:
    scene = pair(decodes=2, policy="static", local_share=1.0)
    known = {"gone": session("d9"), "epoch": session("d0", epoch=2), "silent": session("d0")}[why]
    if why == "silent":
        scene.beat(d0=-1)
        scene.pass_ms(3_000)
    found = scene.place(case(session=known))
    assert found is not None
    assert (found.mode, found.reason) == (Mode.REMOTE, Reason.SESSION_WORKER_GONE)


@pytest.mark.parametrize(("policy", "waits"), [("static", True), ("learned", False)])
def test_a_turn_without_prefill_credit(policy: str, waits: bool) -> None:
    scene = pair(policy=policy, local_share=0.0, max_local_prefill_tokens=0)
    scene.beat(p0=0)
    found = scene.place(case(5_000, session("d0", 0)))
    assert (found is None) == waits
    if found is not None:
        assert (found.mode, found.reason) == (Mode.LOCAL, Reason.PREFILL_QUEUE_LONG)
    assert scene.place(case()) is None


@pytest.mark.parametrize(
    ("policy", "known", "at_once"),
    [("static", True, False), ("learned", True, True), ("learned", False, False)],
)
def test_without_prefill_workers(policy: str, known: bool, at_once: bool) -> None:
    scene = PlacerFixture(policy=policy, local_after_ms=1_000)
    scene.workers(Role.PREFILL, "p0")
    scene.workers(Role.DECODE, "d0", "d1")
    scene.beat(p0=-1)
    scene.pass_ms(LEASE_MS + 1)  # it is lost
    asked = case(session=session("d1") if known else None)
    scene.fleet.prefill_absent_ms(scene.now_ms)
    assert (scene.place(asked) is not None) == at_once
    scene.pass_ms(1_000)
    found = scene.place(asked)
    assert found is not None
    assert (found.mode, found.reason) == (Mode.LOCAL, Reason.NO_WORKER)
    assert found.decode is scene.worker("d1" if known else "d0")


def test_where_no_prefill_worker_is_known_nobody_waits_for_one() -> None:
    scene = PlacerFixture(local_after_ms=60_000)
    scene.workers(Role.DECODE, "d0")
    found = scene.place(case())
    assert found is not None
    assert (found.mode, found.reason) == (Mode.LOCAL, Reason.NO_WORKER)


def test_without_prefill_workers_a_replica_goes_before_a_strange_decode_worker() -> None:
    scene = PlacerFixture(policy="learned")
    scene.workers(Role.DECODE, "d0")
    scene.workers(Role.REPLICA, "x0")
    for asked, worker in ((case(), "x0"), (case(session=session("d0")), "d0")):
        found = scene.place(asked)
        assert found is not None and found.decode is scene.worker(worker)
    scene.beat(d0=0, x0=0)
    scene.fleet.prefill_absent_ms(scene.now_ms)
    scene.pass_ms(5_000)
    assert scene.place(case()) is None


def test_remote_placements_run_ahead_of_decode_only_so_far() -> None:
    scene = pair(handover_ahead=1)
    scene.beat(d0=1)
    assert scene.place(case(before_decode=1)) is not None
    assert scene.place(case(before_decode=2)) is None
    scene.beat(d0=0)
    found = scene.place(case(before_decode=0))
    assert found is not None
    assert (found.decode, found.orchestration) == (None, Orchestration.PREFILL_FIRST)


def test_handing_over() -> None:
    scene = pair(decodes=2)
    known = session("d1")
    assert scene.hand_over(case())[1] is Reason.PREFILL_DONE
    assert scene.hand_over(case(session=known)) == ("d1", Reason.SESSION_WORKER)
    scene.holds("d1", 0, range(96))
    assert scene.hand_over(case()) == ("d1", Reason.PREFIX_CACHED)
    scene.beat(d1=0)
    assert scene.hand_over(case(session=known)) == ("d0", Reason.SESSION_WORKER_FULL)
    scene.beat(d0=0)
    assert scene.hand_over(case())[0] == ""
    scene.workers(Role.REPLICA, "x0")
    scene.beat(d0=-1, d1=-1)
    scene.pass_ms(3_000)
    assert scene.hand_over(case()) == ("x0", Reason.NO_WORKER)


def mixed(**settings: Any) -> PlacerFixture:
    scene = pair(**settings)
    scene.workers(Role.REPLICA, "x0", "x1")
    return scene


def test_mixed_pools_all_get_work_and_keep_their_sessions() -> None:
    scene = mixed(policy="static")
    placed = [scene.take(case(1_000)) for _ in range(9)]
    names = [str((p.prefill or p.decode or scene.worker("x0")).worker_id) for p in placed]
    assert [names.count(name) for name in ("p0", "x0", "x1")] == [3, 3, 3]
    known = scene.place(case(session=session("x1")))
    assert known is not None
    assert (known.decode, known.reason) == (scene.worker("x1"), Reason.SESSION_WORKER)
    scene.beat(x1=0)
    moved = scene.place(case(session=session("x1")))
    assert moved is not None
    assert moved.reason is Reason.SESSION_WORKER_FULL


def test_replicas_where_the_pair_is_incomplete_or_the_policy_says_so() -> None:
    scene = mixed(policy="replica")
    found = scene.place(case())
    assert found is not None
    assert (found.mode, found.reason, found.policy) == (Mode.REPLICA, Reason.LEAST_WORK, "replica")
    scene = PlacerFixture(policy="static")
    scene.workers(Role.REPLICA, "x0")
    scene.workers(Role.PREFILL, "p0")
    found = scene.place(case())
    assert found is not None
    assert found.reason is Reason.ONLY_REPLICAS
    scene = mixed(policy="static")
    scene.beat(p0=0)
    scene.holds("x1", 0, range(96))
    found = scene.place(case())
    assert found is not None
    assert (found.decode, found.reason) == (scene.worker("x1"), Reason.PREFIX_CACHED)
    scene.beat(x0=0, x1=0)
    assert scene.place(case()) is None


def test_a_prefix_draws_a_request_until_the_queue_there_costs_more() -> None:
    scene = pair(prefills=2, window=100)
    scene.holds("p1", 0, range(1_600))
    first = scene.take(case(2_000))
    assert (first.prefill, first.prefill_cached_tokens) == (scene.worker("p1"), 1_600)
    others = [scene.take(case(2_000)) for _ in range(9)]
    names = [p.prefill.worker_id for p in others if p.prefill is not None]
    assert names[:3] == ["p1"] * 3
    assert "p0" in names


def test_no_herd_on_a_fresh_worker() -> None:
    scene = pair(prefills=2, window=100)
    scene.workers(Role.PREFILL, "p2", window=100)
    placed = [scene.take(case(n + 100)) for n in range(9)]
    names = sorted(p.prefill.worker_id for p in placed if p.prefill is not None)
    assert names == ["p0"] * 3 + ["p1"] * 3 + ["p2"] * 3


def test_a_slow_worker_gets_less() -> None:
    scene = pair(prefills=2, window=1_000)
    scene.fleet.set_pace(("p0", 1), Role.PREFILL, 3.0)
    placed = [scene.take(case(1_000)) for _ in range(40)]
    slow = sum(p.prefill is scene.worker("p0") for p in placed)
    assert slow == 10


def test_load_is_requests_per_worker() -> None:
    scene = pair(prefills=1, decodes=3)
    for _ in range(6):
        scene.take(case())
    assert selection.load(scene.fleet, scene.now_ms) == 1.5
    found = scene.place(case())
    assert found is not None and found.load == 1.5
    empty = PlacerFixture()
    assert selection.load(empty.fleet, empty.now_ms) == 0.0


def test_candidates_tell_what_is_so_now() -> None:
    scene = pair(2, 0)
    p0, p1 = scene.worker("p0"), scene.worker("p1")

    def seen() -> list[tuple[str, int, int]]:
        found = selection.candidates(scene.fleet, {p1: 7}, (Role.PREFILL,), 4, scene.now_ms)
        return [(each.worker_id, each.credits, each.cached_tokens) for each in found]

    assert seen() == [("p1", 8, 7), ("p0", 8, 0)]
    scene.fleet.add_request(p0, 5)
    assert seen() == [("p1", 8, 7), ("p0", 7, 0)]
    scene.beat(p0=3)
    assert seen() == [("p1", 8, 7), ("p0", 2, 0)]
    scene.fleet.pause(p0.life, Role.PREFILL)
    assert seen() == [("p1", 8, 7), ("p0", 0, 0)]


def test_weights_of_request_class_and_deployment() -> None:
    scene = pair(w_ttft=0.6, w_tpot=0.4, weights_interactive="0.9/0.1")
    cases = [
        (case(), (0.6, 0.4)),
        (case(priority=Priority.INTERACTIVE), (0.9, 0.1)),
        (case(priority=Priority.INTERACTIVE, w_ttft=0.0), (0.0, 0.1)),
        (case(w_tpot=2.0), (0.6, 2.0)),
    ]
    for asked, expected in cases:
        found = scene.place(asked)
        assert found is not None and (found.w_ttft, found.w_tpot) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "best"}, "router.policy: expected one of learned, .* found 'best'"),
        ({"orchestration": "both"}, "router.orchestration: expected one of auto"),
        ({"local_share": 1.5}, "router.local_share: expected at most 1, found 1.5"),
        ({"weights_batch": "1"}, "router.weights_batch: expected two weights .* found '1'"),
        ({"weights_batch": "1/-1"}, "router.weights_batch: expected two weights"),
        ({"weights_batch": "1/inf"}, "router.weights_batch: expected two weights"),
        ({"w_ttft": -1.0}, "router.w_ttft: expected at least 0, found -1.0"),
        ({"w_ttft": float("nan")}, "router.w_ttft: expected a finite number, found nan"),
        ({"tick_ms": 0}, "router.tick_ms: expected at least 1, found 0"),
    ],
)
def test_settings_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RouterSettings(**changes)


P, D, C = Orchestration.PREFILL_FIRST, Orchestration.DECODE_FIRST, Orchestration.CONCURRENT


@pytest.mark.parametrize(
    ("wanted", "held", "prefill", "decode", "expected"),
    [
        ("auto", 0, {}, {}, C),
        ("auto", 320, {}, {}, D),
        ("auto", 240, {}, {}, C),
        ("auto", 320, {"orchestrations": (P, C)}, {}, C),
        ("auto", 320, {"orchestrations": (P, D)}, {"orchestrations": (P, C)}, P),
        ("decode_first", 0, {}, {}, D),
        ("decode_first", 0, {}, {"orchestrations": (P, C)}, C),
        ("concurrent", 320, {"orchestrations": (P, D)}, {}, P),
        ("prefill_first", 320, {}, {}, P),
        ("auto", 0, {"block_size": 32}, {}, P),
        ("auto", 0, {"kv_layout": "y"}, {}, P),
        ("auto", 0, {"model": "other"}, {}, P),
        ("auto", 0, {"tensor_parallel": 2}, {}, C),
        ("auto", 0, {"engine": "vllm", "tensor_parallel": 2}, {"engine": "vllm"}, P),
    ],
)
def test_orchestrations(
    wanted: str,
    held: int,
    prefill: dict[str, Any],
    decode: dict[str, Any],
    expected: Orchestration,
) -> None:
    scene = PlacerFixture(orchestration=wanted)
    scene.workers(Role.PREFILL, "p0", **{"orchestrations": ALL, **prefill})
    scene.workers(Role.DECODE, "d0", **{"orchestrations": ALL, **decode})
    scene.holds("d0", 0, range(held))
    found = scene.place(case(1_000))
    assert found is not None and found.orchestration is expected


def test_an_answer_of_one_token_ends_in_prefill() -> None:
    found = pair(orchestration="concurrent").place(case(max_tokens=1))
    assert found is not None and found.orchestration is P


def test_a_worker_with_both_roles_is_no_pair_with_itself() -> None:
    scene = PlacerFixture()
    scene.workers(Role.PREFILL, "w0", "w1", orchestrations=ALL)
    settings = RouterSettings()
    both, other = scene.worker("w0"), scene.worker("w1")
    assert orchestration.choose(settings, "concurrent", 8, both, other, 0) == (C, Unmet.NONE)
    assert orchestration.choose(settings, "concurrent", 8, both, both, 0) == (P, Unmet.ONE_WORKER)


def test_a_long_prompt_is_hashed_whole_only_where_it_may_be_held() -> None:
    scene = pair(prefills=2)
    asked = case(10_000)
    scene.holds("p1", 0, range(9_600))
    found = scene.place(asked)
    assert found is not None
    assert (found.prefill, found.prefill_cached_tokens) == (scene.worker("p1"), 9_600)
    other = case(range(50_000, 60_000))
    assert scene.place(other) is not None
    assert [len(hashes) for hashes in other._chains.values()] == [2_048 // 16]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(list(MemberState)), st.integers(0, 3_000)),
        max_size=40,
    )
)
def test_remembered_lives_are_those_of_the_workers(
    steps: list[tuple[int, MemberState, int]],
) -> None:
    scene = pair(prefills=3)
    for seq, (number, state, passed_ms) in enumerate(steps, 10):
        scene.now_ms += passed_ms
        beat = builders.beat(f"p{number}", seq, {Role.PREFILL: number}, state=state)
        scene.fleet.apply(beat, seq, scene.now_ms)
        pool = scene.fleet.pools[Role.PREFILL]
        for at_ms in (scene.now_ms, scene.now_ms + 1_700):
            expected = [worker.is_alive(at_ms) for worker in pool.workers]
            assert pool.living(at_ms).tolist() == expected
            assert pool.living_count(at_ms) == sum(expected)
            assert pool.open(at_ms).tolist() == [
                w.is_alive(at_ms) and w.free > 0 for w in pool.workers
            ]
