"""What a router tells of what waits, and of what requests ask of workers."""

from schemas.records import Backlog, PhaseKind, WorkPhase
from tests.streams import builders
from tests.streams.core.router_setups import replicas, split, to_decoding, work_of


def test_backlog_of_idle_router_has_only_step_estimates() -> None:
    on = split()
    idle = on.router.backlogs(on.now_ms)[0]
    assert idle == Backlog(model="tiny", step_ms=idle.step_ms, sharing_ms=idle.sharing_ms)
    assert idle.step_ms > 0
    assert [idle.step_ms, idle.sharing_ms] == on.router.placer.estimates_of(
        "tiny"
    ).decode.coefficients[:2]


def test_backlog_counts_waiting_requests_with_age_and_slack() -> None:
    on = replicas(window=1)
    for number in range(3):
        on.request(f"r{number}", deadline_ms=on.now_ms + 60_000)
        on.pass_ms(1_000)
    backlog = on.router.backlogs(on.now_ms)[0]
    assert (backlog.waiting, backlog.oldest_ms) == (2, 2_000)
    assert 50_000 < backlog.slack_ms < 60_000 - 2_000
    assert backlog.handing_over == backlog.retrieving == 0


def test_backlog_estimates_tokens_and_times_of_requests() -> None:
    on = split()
    work = to_decoding(on)
    backlog = on.router.backlogs(on.now_ms)[0]
    assert backlog.prompt_tokens == len(work.prompt_tokens) // 4
    assert backlog.requests_per_s > 0 and backlog.prefill_ms > 0 and backlog.append_ms == 0
    assert backlog.answer_tokens == 0
    on.outcome(work, completion_tokens=7)
    assert on.router.backlogs(on.now_ms)[0].answer_tokens == 7


def test_backlog_counts_replica_prompts_as_append() -> None:
    on = replicas()
    on.request("r1")
    backlog = on.router.backlogs(on.now_ms)[0]
    assert backlog.prefill_ms == 0 and backlog.append_ms > 0


def test_backlog_counts_handovers_and_searches() -> None:
    on = split(decodes=1)
    for number in range(6):
        on.request(f"r{number}")
    for number in range(6):
        on.phase(work_of(on, WorkPhase.PREFILL, f"r{number}"), PhaseKind.PREFILL_DONE)
    assert on.router.backlogs(on.now_ms)[0].handing_over == 2
    on.request("s", retrieval=builders.retrieval(on.now_ms + 5_000))
    assert on.router.backlogs(on.now_ms)[0].retrieving == 1
