"""When failed moves are tried again."""

from workers.kv.retries import Retries


def test_retries_double_pauses_until_limit() -> None:
    retries = Retries[str](4, 0.5)
    now_s, waited = 10.0, []
    while retries.record_failure("a", now_s):
        assert "a" in retries and len(retries) == 1
        pause_s = next(at / 2 for at in range(1, 100) if retries.due(now_s + at / 2))
        waited.append(pause_s)
        now_s += pause_s
    assert waited == [0.5, 1.0, 2.0]
    assert (retries.tries("a"), retries.total, len(retries)) == (4, 3, 0)


def test_retries_restart_after_forget() -> None:
    retries = Retries[str](2, 1.0)
    assert retries.record_failure("a", 0.0) and retries.record_failure("b", 0.5)
    retries.forget("a")
    assert retries.due(9.0) == ["b"]
    assert retries.record_failure("a", 9.0)
    assert not retries.record_failure("b", 9.0)
    assert retries.due(9.5) == []
    assert retries.due(10.0) == ["a"]
