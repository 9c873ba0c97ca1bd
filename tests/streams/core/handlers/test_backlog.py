"""What a router tells of what waits, and of what requests ask of workers."""

from schemas.records import Backlog, PhaseKind, WorkPhase
from tests.streams import builders
from tests.streams.core.router_setups import replicas, split, to_decoding, work_of


def test_a_router_with_nothing_to_do_tells_so() -> None:
    on = split()
    idle = on.router.backlog(on.now_ms)
    assert idle == Backlog(step_ms=idle.step_ms, sharing_ms=idle.sharing_ms)
    assert idle.step_ms > 0
    assert [idle.step_ms, idle.sharing_ms] == on.router.placer.estimates.decode.coefficients[:2]


def test_it_tells_how_many_wait_how_long_and_how_long_they_may() -> None:
    on = replicas(window=1)
    for number in range(3):
        on.request(f"r{number}", deadline_ms=on.now_ms + 60_000)
        on.pass_ms(1_000)
    told = on.router.backlog(on.now_ms)
    assert (told.waiting, told.oldest_ms) == (2, 2_000)
    assert 50_000 < told.slack_ms < 60_000 - 2_000
    assert told.handing_over == told.retrieving == 0


def test_it_tells_what_requests_take() -> None:
    on = split()
    work = to_decoding(on)
    told = on.router.backlog(on.now_ms)
    assert told.prompt_tokens == len(work.prompt_tokens) // 4
    assert told.requests_per_s > 0 and told.prefill_ms > 0 and told.append_ms == 0
    assert told.answer_tokens == 0
    on.outcome(work, completion_tokens=7)
    assert on.router.backlog(on.now_ms).answer_tokens == 7


def test_prompts_of_replicas_count_there() -> None:
    on = replicas()
    on.request("r1")
    told = on.router.backlog(on.now_ms)
    assert told.prefill_ms == 0 and told.append_ms > 0


def test_it_tells_what_waits_for_decode_and_for_searches() -> None:
    on = split(decodes=1)
    for number in range(6):
        on.request(f"r{number}")
    for number in range(6):
        on.phase(work_of(on, WorkPhase.PREFILL, f"r{number}"), PhaseKind.PREFILL_DONE)
    assert on.router.backlog(on.now_ms).handing_over == 2
    on.request("s", retrieval=builders.retrieval(on.now_ms + 5_000))
    assert on.router.backlog(on.now_ms).retrieving == 1
