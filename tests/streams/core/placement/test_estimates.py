"""What is learned of times: models, paces, hops, and what it is worth when notes are missing."""

from random import Random
from typing import Any

import pytest

from schemas.records import Estimate, Load, Role
from streams.config import RouterSettings
from streams.core.placement import estimates
from streams.core.placement.estimates import Estimates
from tests.streams import builders
from tests.streams.core.placement.placer_fixture import PlacerFixture, case, pair, session
from tests.streams.core.placement.queue_simulation import Laws, simulated


def test_estimates_learn_speeds_from_measured_turns() -> None:
    run = simulated(Laws(noise=0.02), policy="static", local_share=0.5)
    run.run(400, per_s=6.0, later_share=0.6, new_tokens=500, answer=60)
    speeds = run.scene.estimates.speeds
    assert speeds.append_ms_per_token == pytest.approx(0.05, rel=0.15)
    assert speeds.prefill_ms_per_token == pytest.approx(0.05, rel=0.25)
    assert speeds.transfer_ms_per_token == pytest.approx(0.01, abs=0.0101)
    assert run.scene.estimates.answer_share > 0.9


def test_estimates_pass_pace_of_slow_worker_to_pool() -> None:
    scene = pair(prefills=2, policy="static")
    estimates = scene.estimates
    for number in range(40):
        name, took_ms = ("p0", 100.0) if number % 2 else ("p1", 300.0)
        note = estimates.note_remote(scene.worker(name), None, 1_000, 10, scene.now_ms)
        estimates.observe_prefill(note, (name, 1), 1_000, took_ms)
    assert scene.worker("p1").pace == 1.0
    placed = [scene.take(case(1_000)).prefill for _ in range(8)]
    assert scene.worker("p1").pace > 1.5 * scene.worker("p0").pace
    assert sum(worker is scene.worker("p1") for worker in placed) in (2, 3)


def test_estimates_bound_paces_of_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "PACES_MAX", 3)
    scene = pair(policy="static")
    scene_estimates = scene.estimates
    for epoch in range(9):
        note = scene_estimates.note_remote(scene.worker("p0"), None, 1_000, 10, scene.now_ms)
        scene_estimates.observe_prefill(note, ("p0", epoch), 1_000, 100.0)
    assert len(scene_estimates._paces) == 3


def test_estimates_learn_nothing_from_prefill_of_local_note() -> None:
    scene = pair(policy="static")
    estimates = scene.estimates
    note = estimates.note_local(scene.worker("d0"), 1_000, 10, scene.now_ms)
    estimates.observe_prefill(note, ("p0", 1), 1_000, 100.0)
    assert estimates.prefill.samples == 0 and not note.prefill_ms


def test_estimates_learn_no_hop_without_prefill_report() -> None:
    scene = pair(policy="static")
    estimates, decode = scene.estimates, scene.worker("d0")
    note = estimates.note_remote(scene.worker("p0"), decode, 1_000, 10, scene.now_ms)
    before_ms = estimates.hop_ms
    estimates.observe_answer(
        note, decode, computed_tokens=0, ttft_ms=500.0, tpot_ms=5.0, now_ms=scene.now_ms + 600
    )
    assert estimates.hop_ms == before_ms and estimates.decode.samples == 1


def test_estimates_learn_nothing_from_answer_of_other_worker() -> None:
    scene = pair(decodes=2, policy="static", local_share=1.0)
    request_case = case(2_000, session("d0"))
    scene.take(request_case)
    estimates: Estimates = scene.estimates
    assert request_case.note is not None
    estimates.observe_answer(
        request_case.note,
        scene.worker("d1"),
        computed_tokens=10,
        ttft_ms=5.0,
        tpot_ms=5.0,
        now_ms=scene.now_ms,
    )
    assert estimates.append.samples == 0


def answer(
    estimates: Estimates, scene: PlacerFixture, tokens: int, moved_tokens: int, ended_ms: int
) -> None:
    """A remote request was answered with so many tokens of 10 ms, after 50 ms of hand-over."""
    p0, d0 = scene.worker("p0"), scene.worker("d0")
    note = estimates.note_remote(p0, d0, 1_000, 1_000, ended_ms, moved_tokens)
    estimates.observe_prefill(note, ("p0", 1), 1_000, 100.0)
    took_ms = 10.0 * tokens + 50.0
    estimates.observe_answer(
        note,
        d0,
        computed_tokens=0,
        ttft_ms=100.0,
        tpot_ms=took_ms / tokens,
        now_ms=ended_ms + 100 + round(took_ms),
    )


def expected(estimates: Estimates, scene: PlacerFixture, **changes: Any) -> Estimate:
    values = {"append_tokens": 1_000, "prefill_tokens": 1_000, "moved_tokens": 1_000}
    return estimates.expect(
        home=scene.worker("d0"),
        prefill=scene.worker("p0"),
        prompt_tokens=1_000,
        max_tokens=1_000,
        weights=(0.5, 0.5),
        now_ms=scene.now_ms,
        **{**values, **changes},
    )


@pytest.mark.parametrize("tokens", [10, 100])
def test_estimates_spread_handover_over_answer(tokens: int) -> None:
    random, scene = Random(6), pair(policy="learned")
    estimates = scene.estimates
    for _ in range(100):
        answer(estimates, scene, random.choice((10, 30, 100)), 1_000, scene.now_ms)
    for _ in range(500):
        answer(estimates, scene, tokens, 1_000, scene.now_ms)
    estimate = expected(estimates, scene)
    assert estimate.tpot_remote_ms == pytest.approx(10.0 + 50.0 / tokens, rel=0.1)
    assert estimates.answer_tokens == pytest.approx(tokens, rel=0.2)


def test_estimates_price_moved_kv_per_token() -> None:
    scores = {}
    for w_kv in (0.0, 0.1):
        scene = pair(policy="learned", w_kv=w_kv)
        for moved in (0, 4_000):
            estimate = expected(scene.estimates, scene, moved_tokens=moved)
            scores[w_kv, moved] = estimate.score
            terms = 0.5 * estimate.gain_ttft - 0.5 * estimate.loss_tpot + estimate.kv_price
            assert terms == pytest.approx(estimate.score)
    assert scores[0.1, 0] == scores[0.0, 0]
    assert scores[0.1, 4_000] - scores[0.0, 4_000] == pytest.approx(0.4)


def test_estimates_count_delay_of_prompts_behind_on_both_sides() -> None:
    """This replaces counting a first turn's local time twice."""
    scores = {}
    for busy in ("nobody", "d0", "p0"):
        scene = pair(policy="learned")
        estimates, worker = scene.estimates, scene.worker("p0" if busy == "p0" else "d0")
        for _ in range(20 if busy != "nobody" else 0):
            if busy == "p0":
                estimates.note_remote(worker, None, 100, 100, scene.now_ms)
            else:
                estimates.note_local(worker, 100, 100, scene.now_ms)
        scores[busy] = expected(estimates, scene)
    assert scores["d0"].score < scores["nobody"].score < scores["p0"].score
    assert scores["nobody"].gain_ttft == pytest.approx(
        1 - scores["nobody"].ttft_local_ms / scores["nobody"].ttft_remote_ms
    )
    # 20 prompts in 2 s, whose 2 000 tokens of 0.1 ms keep a worker busy for a tenth of its time:
    # 1 000 tokens take 100 ms, and 10 per s come in the second half of that time.
    loss = scores["nobody"].gain_ttft - scores["d0"].gain_ttft
    assert loss * scores["d0"].ttft_remote_ms == pytest.approx(100 * 0.01 * 50 / 0.9)


@pytest.mark.parametrize("prompts_per_s", [0.0, 5.0, 10.0])
def test_estimates_match_long_run_cost_of_local_prompt(
    prompts_per_s: float,
) -> None:
    """What a local prompt costs a batch in the long run.

    Computed anew: 10 requests per s have answers of 100 tokens. A token takes 8 ms, 0.1 ms for each
    stream, and 0.02 ms for each prompt token that is computed meanwhile.
    """
    per_ms, answer_tokens, tokens, sharing_ms, each_ms = 0.01, 100.0, 1_000, 0.1, 0.02

    def tpot_ms(token_rate: float) -> float:
        found_ms = 8.0
        for _ in range(200):  # each streams' time decides how many of them run at once
            running = per_ms * answer_tokens * found_ms
            found_ms = 8.0 + sharing_ms * running + each_ms * token_rate * found_ms
        return found_ms

    rate = prompts_per_s * tokens / 1_000
    now_ms, few = tpot_ms(rate), 1e-6
    scene = pair(policy="learned")
    estimates, home = scene.estimates, scene.worker("d0")
    home.token_rate, home.rates_at_ms = rate, scene.now_ms
    home.others_running = per_ms * answer_tokens * now_ms  # type: ignore[assignment]  # a mean
    estimates.answer_tokens = answer_tokens
    estimates.decode.coefficients = [8.0, sharing_ms, 0.0, each_ms * now_ms, 0.0, 0.0]
    estimate = expected(estimates, scene)
    assert estimate.tpot_remote_ms == pytest.approx(now_ms)
    lost_ms = per_ms * tokens * (tpot_ms(rate + few) - now_ms) / few  # by all, for one prompt
    assert estimate.tpot_local_ms - now_ms == pytest.approx(lost_ms, rel=1e-3)


def test_estimates_bound_loss_of_batch() -> None:
    """The streams here seem to do nothing but wait for one another."""
    scene = pair(policy="learned")
    estimates, home = scene.estimates, scene.worker("d0")
    home.others_running, estimates.answer_tokens = 10, 100.0
    estimates.decode.coefficients = [0.0, 1.0, 0.0, 0.1, 0.0, 0.0]
    assert expected(estimates, scene).loss_tpot == pytest.approx(
        5 * (10 * 0.1 * 1_000 / 10 / 100) / 10
    )


def test_estimates_assume_prefill_speed_for_append_without_samples() -> None:
    """Otherwise no later turn would be local, and append speed would stay unknown."""
    scene = pair(policy="learned")
    estimates = scene.estimates
    before = expected(estimates, scene)
    for _ in range(100):
        answer(estimates, scene, 50, 1_000, scene.now_ms)
    after = expected(estimates, scene)
    step_ms = estimates.decode.coefficients[0]
    assert after.ttft_local_ms == pytest.approx(after.ttft_remote_ms + step_ms)
    assert (before.samples, after.samples) == (0, 100) and not estimates.append.samples


def test_heartbeats_extend_busy_time_of_worker() -> None:
    scene = pair(policy="static", local_share=1.0)
    scene.take(case(1_000, session("d0")))
    worker = scene.worker("d0")
    worker.append_ms_per_token = 2.0
    load = Load(queued_tokens=900, running=1)
    for now_ms, queued in ((scene.now_ms + 500, load), (scene.now_ms + 600, Load())):
        beat = builders.beat("d0", now_ms, {Role.DECODE: 8}, load=queued)
        scene.fleet.apply(beat, now_ms, now_ms)
        assert worker.busy_until_ms == scene.now_ms + 500 + 1_800
    others_load = Load(queued_tokens=5_000, running=1)  # 4 000 of them another router's
    scene.fleet.apply(
        builders.beat("d0", scene.now_ms + 700, {Role.DECODE: 8}, load=others_load),
        9,
        scene.now_ms + 700,
    )
    assert worker.others_tokens == 4_000
    assert worker.busy_until_ms == scene.now_ms + 700 + 2_000


def test_estimates_assume_speeds_until_measured() -> None:
    speeds = Estimates(RouterSettings()).speeds
    assert speeds.prefill_ms_per_token == speeds.append_ms_per_token == 0.1
