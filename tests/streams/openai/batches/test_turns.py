"""Whose batches have a place, and who leaves one."""

from schemas.records import Batch
from streams.openai.batches.turns import (
    CARRIED_MAX,
    TURN_LINES,
    WAITING_BYTES,
    WAITING_MAX,
    BatchSlot,
    choose_batches,
    choose_leaver,
    may_send,
)


def batch(tenant: str, number: int) -> Batch:
    return Batch(
        batch_id=f"batch_{number}",
        tenant=tenant,
        input_file_id="file-1",
        endpoint="/v1/completions",
        window="24h",
        metadata="",
        created_ms=number,
        expires_ms=10**9,
        output_expires_s=0,
    )


def placed(tenant: str, number: int, sent_lines: int = 0) -> BatchSlot:
    return BatchSlot(f"{tenant}/batch_{number}", tenant, sent_lines)


def test_choose_batches_prefers_tenants_with_fewest_slots() -> None:
    bobs = [batch("bob", number) for number in range(40)]
    alone = choose_batches({"bob": iter(bobs)}, [], {})
    assert alone == bobs[:CARRIED_MAX], "who is alone has all"
    alices = [batch("alice", 50), batch("alice", 51)]
    waiting = {"bob": iter(bobs), "alice": iter(alices)}
    choice = choose_batches(
        waiting, [placed("bob", 60) for _ in range(CARRIED_MAX - 3)], {"alice": 9}
    )
    assert choice == [*alices, bobs[0]] and next(waiting["bob"]) == bobs[1], "no more are looked at"
    assert choose_batches({}, [], {}) == []


def test_choose_batches_breaks_ties_by_longest_wait() -> None:
    left_at = {"bob": 2, "carol": 1}
    waiting = {name: iter([batch(name, 0)]) for name in ("bob", "carol", "dave")}
    assert [choice.tenant for choice in choose_batches(waiting, [], left_at)] == [
        "dave",
        "carol",
        "bob",
    ]


def test_choose_leaver_takes_slot_from_tenant_with_most() -> None:
    """Sixteen batches of one tenant do not keep another's single line waiting."""
    bobs = [placed("bob", number) for number in range(CARRIED_MAX - 1)]
    assert choose_leaver(["alice"], [*bobs, placed("carol", 20)]) == "bob/batch_0"
    assert choose_leaver(["alice"], bobs) is None, "there is room"
    assert choose_leaver(["bob"], [*bobs, placed("carol", 20)]) is None
    slots = [placed(f"t{number}", number) for number in range(CARRIED_MAX)]
    assert choose_leaver(["alice"], slots) is None, "each has its turn first"
    slots[5] = placed("t5", 5, sent_lines=TURN_LINES)
    assert choose_leaver(["alice"], slots) == "t5/batch_5"


def test_may_send_shares_lines_ahead_between_tenants() -> None:
    assert may_send(250, WAITING_MAX - 250, 0, 1) and not may_send(250, WAITING_MAX - 249, 0, 1)
    assert may_send(250, WAITING_MAX // 4 - 250, 0, 4)
    assert not may_send(250, WAITING_MAX // 4 - 249, 0, 4)
    assert may_send(250, 9, WAITING_BYTES / 2, 2) and not may_send(250, 9, WAITING_BYTES, 2)
    assert may_send(250, 0, 0, 99), "a first few always"
