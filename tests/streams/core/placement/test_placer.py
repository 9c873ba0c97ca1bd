"""Which workers, mode and orchestration a request gets, case by case."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ConfigError
from schemas.fleet import LEASE_MS
from schemas.records import MemberState, Mode, Orchestration, Priority, Reason, Role, Unmet
from streams.config import RouterSettings
from streams.core.placement import placer, selection
from streams.core.placement.placer import HANDOVER_AHEAD
from streams.core.placement.ppd_table import PpdTable
from tests.streams import builders
from tests.streams.core.placement.placer_fixture import ALL, PlacerFixture, case, pair, session

EMPTY = PpdTable({"context_tokens": [1], "new_tokens": [1], "answer_tokens": [1], "load": [1]}, [])


def test_placer_places_first_turn_remotely() -> None:
    for policy in ("learned", "table", "static"):
        scene = pair(policy=policy, local_share=1.0, table=EMPTY)
        placement = scene.place(case())
        assert placement is not None
        assert (placement.mode, placement.reason, placement.policy) == (
            Mode.REMOTE,
            Reason.FIRST_TURN,
            policy,
        )
        policy_reason = Reason.TOO_LITTLE_KNOWN if policy == "learned" else Reason.UNKNOWN
        assert placement.policy_reason is policy_reason


@pytest.mark.parametrize(("context", "cached_tokens"), [(0, 0), (16, 0), (17, 16), (1_000, 992)])
def test_placer_counts_history_in_whole_blocks_without_last_token(
    context: int, cached_tokens: int
) -> None:
    scene = pair(policy="static", local_share=1.0)
    placement = scene.place(case(2_000, session("d0", context)))
    assert placement is not None
    assert placement.decode_cached_tokens == cached_tokens


def test_placer_prices_moved_kv_wherever_history_is() -> None:
    modes = {}
    for w_kv in (0.0, 50.0):
        scene = pair(decodes=2, policy="learned", samples_min=0, explore_share=0.0, w_kv=w_kv)
        scene.pools.occupy(scene.worker("d1"), scene.now_ms + 60_000, 0.1)
        for last_session in (None, session("d9"), session("d0", 16)):
            scene.pools.occupy(scene.worker("d0"), scene.now_ms + 1_000, 0.1)
            placement = scene.take(case(1_000, last_session))
            assert placement.estimate is not None
            assert placement.decode is scene.worker("d0") or placement.mode is Mode.REMOTE
            modes[w_kv, last_session and last_session.decode_worker] = (
                placement.mode,
                placement.reason,
            )
    local = (Mode.LOCAL, Reason.LEARNED)
    assert [modes[50.0, on] for on in (None, "d9", "d0")] == [local] * 3
    assert [modes[0.0, on] for on in (None, "d9", "d0")] == [
        (Mode.REMOTE, Reason.FIRST_TURN),
        (Mode.REMOTE, Reason.SESSION_WORKER_GONE),
        (Mode.REMOTE, Reason.LEARNED),
    ]


def test_placer_spreads_local_first_turns() -> None:
    scene = pair(decodes=3, window=100, policy="learned", samples_min=0, w_kv=50.0)
    names = []
    for _ in range(12):
        placement = scene.take(case(100))
        assert placement.mode is Mode.LOCAL and placement.decode is not None
        names.append(placement.decode.worker_id)
        scene.pass_ms(1_000)  # computed by then
    assert [names.count(name) for name in ("d0", "d1", "d2")] == [4, 4, 4]


def test_placer_moves_local_turn_from_full_session_worker() -> None:
    scene = pair(decodes=2, policy="static", local_share=1.0)
    scene.beat(d0=0)
    placement = scene.place(case(session=session("d0")))
    assert placement is not None
    assert (placement.mode, placement.reason) == (Mode.REMOTE, Reason.SESSION_WORKER_FULL)
    assert placement.policy_reason is Reason.FIXED_SHARE
    assert placement.decode is scene.worker("d1")


@pytest.mark.parametrize("why", ["gone", "epoch", "silent"])
def test_placer_places_session_remotely_without_its_worker(why: str) -> None:
    scene = pair(decodes=2, policy="static", local_share=1.0)
    last_session = {
        "gone": session("d9"),
        "epoch": session("d0", epoch=2),
        "silent": session("d0"),
    }[why]
    if why == "silent":
        scene.beat(d0=-1)
        scene.pass_ms(3_000)
    placement = scene.place(case(session=last_session))
    assert placement is not None
    assert (placement.mode, placement.reason) == (Mode.REMOTE, Reason.SESSION_WORKER_GONE)


@pytest.mark.parametrize(("policy", "waits"), [("static", True), ("learned", False)])
def test_placer_without_prefill_credit_waits_or_places_locally(policy: str, waits: bool) -> None:
    scene = pair(policy=policy, local_share=0.0, max_local_prefill_tokens=0)
    scene.beat(p0=0)
    placement = scene.place(case(5_000, session("d0", 0)))
    assert (placement is None) == waits
    if placement is not None:
        assert (placement.mode, placement.reason) == (Mode.LOCAL, Reason.PREFILL_QUEUE_LONG)
    assert scene.place(case()) is None


@pytest.mark.parametrize(
    ("policy", "has_session", "at_once"),
    [("static", True, False), ("learned", True, True), ("learned", False, False)],
)
def test_placer_places_locally_after_prefill_workers_are_lost(
    policy: str, has_session: bool, at_once: bool
) -> None:
    scene = PlacerFixture(policy=policy, local_after_ms=1_000)
    scene.workers(Role.PREFILL, "p0")
    scene.workers(Role.DECODE, "d0", "d1")
    scene.beat(p0=-1)
    scene.pass_ms(LEASE_MS + 1)  # it is lost
    request_case = case(session=session("d1") if has_session else None)
    scene.pools.prefill_absent_ms(scene.now_ms)
    assert (scene.place(request_case) is not None) == at_once
    scene.pass_ms(1_000)
    placement = scene.place(request_case)
    assert placement is not None
    assert (placement.mode, placement.reason) == (Mode.LOCAL, Reason.NO_WORKER)
    assert placement.decode is scene.worker("d1" if has_session else "d0")


def test_placer_places_locally_at_once_when_prefill_is_unknown() -> None:
    scene = PlacerFixture(local_after_ms=60_000)
    scene.workers(Role.DECODE, "d0")
    placement = scene.place(case())
    assert placement is not None
    assert (placement.mode, placement.reason) == (Mode.LOCAL, Reason.NO_WORKER)


def test_placer_without_prefill_prefers_replica_to_other_decode_worker() -> None:
    scene = PlacerFixture(policy="learned")
    scene.workers(Role.DECODE, "d0")
    scene.workers(Role.REPLICA, "x0")
    for request_case, worker in ((case(), "x0"), (case(session=session("d0")), "d0")):
        placement = scene.place(request_case)
        assert placement is not None and placement.decode is scene.worker(worker)
    scene.beat(d0=0, x0=0)
    scene.pools.prefill_absent_ms(scene.now_ms)
    scene.pass_ms(5_000)
    assert scene.place(case()) is None


def test_placer_limits_placements_ahead_of_decode() -> None:
    scene = pair()
    scene.beat(d0=1)
    assert scene.place(case(before_decode=HANDOVER_AHEAD)) is not None
    assert scene.place(case(before_decode=1 + HANDOVER_AHEAD)) is None
    scene.beat(d0=0)
    placement = scene.place(case(before_decode=0))
    assert placement is not None
    assert (placement.decode, placement.orchestration) == (None, Orchestration.PREFILL_FIRST)


def test_handoff_chooses_decode_worker_with_reason() -> None:
    scene = pair(decodes=2)
    last_session = session("d1")
    assert scene.hand_over(case())[1] is Reason.PREFILL_DONE
    assert scene.hand_over(case(session=last_session)) == ("d1", Reason.SESSION_WORKER)
    scene.holds("d1", 0, range(96))
    assert scene.hand_over(case()) == ("d1", Reason.PREFIX_CACHED)
    scene.beat(d1=0)
    assert scene.hand_over(case(session=last_session)) == ("d0", Reason.SESSION_WORKER_FULL)
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


def test_placer_uses_mixed_pools_and_keeps_sessions() -> None:
    scene = mixed(policy="static")
    placed = [scene.take(case(1_000)) for _ in range(9)]
    names = [str((p.prefill or p.decode or scene.worker("x0")).worker_id) for p in placed]
    assert [names.count(name) for name in ("p0", "x0", "x1")] == [3, 3, 3]
    placement = scene.place(case(session=session("x1")))
    assert placement is not None
    assert (placement.decode, placement.reason) == (scene.worker("x1"), Reason.SESSION_WORKER)
    scene.beat(x1=0)
    moved = scene.place(case(session=session("x1")))
    assert moved is not None
    assert moved.reason is Reason.SESSION_WORKER_FULL


def test_placer_chooses_replica_for_policy_or_incomplete_pair() -> None:
    scene = mixed(policy="replica")
    placement = scene.place(case())
    assert placement is not None
    assert (placement.mode, placement.reason, placement.policy) == (
        Mode.REPLICA,
        Reason.LEAST_WORK,
        "replica",
    )
    scene = PlacerFixture(policy="static")
    scene.workers(Role.REPLICA, "x0")
    scene.workers(Role.PREFILL, "p0")
    placement = scene.place(case())
    assert placement is not None
    assert placement.reason is Reason.ONLY_REPLICAS
    scene = mixed(policy="static")
    scene.beat(p0=0)
    scene.holds("x1", 0, range(96))
    placement = scene.place(case())
    assert placement is not None
    assert (placement.decode, placement.reason) == (scene.worker("x1"), Reason.PREFIX_CACHED)
    scene.beat(x0=0, x1=0)
    assert scene.place(case()) is None


def test_placer_follows_prefix_until_its_queue_costs_more() -> None:
    scene = pair(prefills=2, window=100)
    scene.holds("p1", 0, range(1_600))
    first = scene.take(case(2_000))
    assert (first.prefill, first.prefill_cached_tokens) == (scene.worker("p1"), 1_600)
    placements = [scene.take(case(2_000)) for _ in range(9)]
    names = [p.prefill.worker_id for p in placements if p.prefill is not None]
    assert names[:3] == ["p1"] * 3
    assert "p0" in names


def test_placer_spreads_requests_over_fresh_worker() -> None:
    scene = pair(prefills=2, window=100)
    scene.workers(Role.PREFILL, "p2", window=100)
    placed = [scene.take(case(n + 100)) for n in range(9)]
    names = sorted(p.prefill.worker_id for p in placed if p.prefill is not None)
    assert names == ["p0"] * 3 + ["p1"] * 3 + ["p2"] * 3


def test_placer_sends_less_to_slow_worker() -> None:
    scene = pair(prefills=2, window=1_000)
    scene.pools.set_pace(("p0", 1), Role.PREFILL, 3.0)
    placed = [scene.take(case(1_000)) for _ in range(40)]
    slow = sum(p.prefill is scene.worker("p0") for p in placed)
    assert slow == 10


def test_load_is_requests_per_worker() -> None:
    scene = pair(prefills=1, decodes=3)
    for _ in range(6):
        scene.take(case())
    assert selection.load(scene.pools, scene.now_ms) == 1.5
    placement = scene.place(case())
    assert placement is not None and placement.load == 1.5
    empty = PlacerFixture()
    assert selection.load(empty.pools, empty.now_ms) == 0.0


def test_candidates_show_current_credits_and_cached_tokens() -> None:
    scene = pair(2, 0)
    p0, p1 = scene.worker("p0"), scene.worker("p1")

    def candidate_rows() -> list[tuple[str, int, int]]:
        candidates = selection.candidates(scene.pools, {p1: 7}, (Role.PREFILL,), 4, scene.now_ms)
        return [
            (candidate.worker_id, candidate.credits, candidate.cached_tokens)
            for candidate in candidates
        ]

    assert candidate_rows() == [("p1", 8, 7), ("p0", 8, 0)]
    scene.fleet.add_request(p0, 5)
    assert candidate_rows() == [("p1", 8, 7), ("p0", 7, 0)]
    scene.beat(p0=3)
    assert candidate_rows() == [("p1", 8, 7), ("p0", 2, 0)]
    scene.fleet.pause(p0.life, Role.PREFILL)
    assert candidate_rows() == [("p1", 8, 7), ("p0", 0, 0)]


def test_placer_takes_weights_of_request_class_or_settings() -> None:
    scene = pair(w_ttft=0.6, w_tpot=0.4, weights_interactive="0.9/0.1")
    cases = [
        (case(), (0.6, 0.4)),
        (case(priority=Priority.INTERACTIVE), (0.9, 0.1)),
        (case(priority=Priority.INTERACTIVE, w_ttft=0.0), (0.0, 0.1)),
        (case(w_tpot=2.0), (0.6, 2.0)),
    ]
    for request_case, expected in cases:
        placement = scene.place(request_case)
        assert placement is not None and (placement.w_ttft, placement.w_tpot) == expected


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
def test_settings_reject_invalid_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RouterSettings(**changes)


P, D, C = Orchestration.PREFILL_FIRST, Orchestration.DECODE_FIRST, Orchestration.CONCURRENT


@pytest.mark.parametrize(
    ("setting", "cached_tokens", "prefill", "decode", "expected"),
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
        ("auto", 0, {"tensor_parallel": 2}, {}, C),
        ("auto", 0, {"engine": "vllm", "tensor_parallel": 2}, {"engine": "vllm"}, P),
    ],
)
def test_placer_chooses_orchestration_that_workers_support(
    setting: str,
    cached_tokens: int,
    prefill: dict[str, Any],
    decode: dict[str, Any],
    expected: Orchestration,
) -> None:
    scene = PlacerFixture(orchestration=setting)
    scene.workers(Role.PREFILL, "p0", **{"orchestrations": ALL, **prefill})
    scene.workers(Role.DECODE, "d0", **{"orchestrations": ALL, **decode})
    scene.holds("d0", 0, range(cached_tokens))
    placement = scene.place(case(1_000))
    assert placement is not None and placement.orchestration is expected


def test_placer_places_one_token_answer_prefill_first() -> None:
    placement = pair(orchestration="concurrent").place(case(max_tokens=1))
    assert placement is not None and placement.orchestration is P


def test_orchestration_pairs_no_worker_with_itself() -> None:
    scene = PlacerFixture()
    scene.workers(Role.PREFILL, "w0", "w1", orchestrations=ALL)
    settings = RouterSettings()
    both, peer = scene.worker("w0"), scene.worker("w1")
    assert placer.choose_orchestration(settings, "concurrent", 8, both, peer, 0) == (C, Unmet.NONE)
    assert placer.choose_orchestration(settings, "concurrent", 8, both, both, 0) == (
        P,
        Unmet.ONE_WORKER,
    )


def test_placer_hashes_long_prompt_whole_only_where_prefix_may_exist() -> None:
    scene = pair(prefills=2)
    request_case = case(10_000)
    scene.holds("p1", 0, range(9_600))
    placement = scene.place(request_case)
    assert placement is not None
    assert (placement.prefill, placement.prefill_cached_tokens) == (scene.worker("p1"), 9_600)
    second_case = case(range(50_000, 60_000))
    assert scene.place(second_case) is not None
    assert [len(hashes) for hashes in second_case._chains.values()] == [2_048 // 16]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(list(MemberState)), st.integers(0, 3_000)),
        max_size=40,
    )
)
def test_pool_living_and_open_match_its_workers(
    steps: list[tuple[int, MemberState, int]],
) -> None:
    scene = pair(prefills=3)
    for seq, (number, state, passed_ms) in enumerate(steps, 10):
        scene.now_ms += passed_ms
        beat = builders.beat(f"p{number}", seq, {Role.PREFILL: number}, state=state)
        scene.fleet.apply(beat, seq, scene.now_ms)
        pool = scene.pools.pools[Role.PREFILL]
        for at_ms in (scene.now_ms, scene.now_ms + 1_700):
            expected = [worker.is_alive(at_ms) for worker in pool.workers]
            assert pool.living(at_ms).tolist() == expected
            assert pool.living_count(at_ms) == sum(expected)
            assert pool.open(at_ms).tolist() == [
                w.is_alive(at_ms) and w.free > 0 for w in pool.workers
            ]
