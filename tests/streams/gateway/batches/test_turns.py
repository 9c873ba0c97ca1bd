"""Whose batches have a place, and who leaves one."""

from schemas.records import Batch
from streams.gateway.batches.turns import (
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


def placed(tenant: str, number: int, sent: int = 0) -> BatchSlot:
    return BatchSlot(f"{tenant}/batch_{number}", tenant, sent)


def test_places_go_to_who_has_fewest() -> None:
    bobs = [batch("bob", number) for number in range(40)]
    alone = choose_batches({"bob": iter(bobs)}, [], {})
    assert alone == bobs[:CARRIED_MAX], "who is alone has all"
    alices = [batch("alice", 50), batch("alice", 51)]
    waiting = {"bob": iter(bobs), "alice": iter(alices)}
    begun = choose_batches(
        waiting, [placed("bob", 60) for _ in range(CARRIED_MAX - 3)], {"alice": 9}
    )
    assert begun == [*alices, bobs[0]] and next(waiting["bob"]) == bobs[1], "no more are looked at"
    assert choose_batches({}, [], {}) == []


def test_of_equals_who_has_been_without_a_place_the_longest_is_next() -> None:
    left = {"bob": 2, "carol": 1}
    waiting = {name: iter([batch(name, 0)]) for name in ("bob", "carol", "dave")}
    assert [each.tenant for each in choose_batches(waiting, [], left)] == ["dave", "carol", "bob"]


def test_who_has_no_place_gets_one_from_who_has_the_most() -> None:
    """Sixteen batches of one tenant kept another's one line waiting (found 28)."""
    bobs = [placed("bob", number) for number in range(CARRIED_MAX - 1)]
    assert choose_leaver(["alice"], [*bobs, placed("carol", 20)]) == "bob/batch_0"
    assert choose_leaver(["alice"], bobs) is None, "there is room"
    assert choose_leaver(["bob"], [*bobs, placed("carol", 20)]) is None
    each = [placed(f"t{number}", number) for number in range(CARRIED_MAX)]
    assert choose_leaver(["alice"], each) is None, "each has its turn first"
    each[5] = placed("t5", 5, sent=TURN_LINES)
    assert choose_leaver(["alice"], each) == "t5/batch_5"


def test_lines_ahead_are_shared() -> None:
    assert may_send(250, WAITING_MAX - 250, 0, 1) and not may_send(250, WAITING_MAX - 249, 0, 1)
    assert may_send(250, WAITING_MAX // 4 - 250, 0, 4)
    assert not may_send(250, WAITING_MAX // 4 - 249, 0, 4)
    assert may_send(250, 9, WAITING_BYTES / 2, 2) and not may_send(250, 9, WAITING_BYTES, 2)
    assert may_send(250, 0, 0, 99), "a first few always"
