"""What the chaos run takes for a wrong answer."""

from infra.bench.faults.conversation_load import wrong
from infra.bench.faults.http_clients import BROKEN
from infra.stack.engine_alone import LoneAnswer
from tests.infra.bench.faults.seen_answers import seen


def test_an_answer_is_wrong_where_it_differs_as_far_as_it_came() -> None:
    expected = {"r1": LoneAnswer(text="one two three")}
    fine = [
        seen("one two three"),
        seen("one tw", ended=BROKEN),
        seen("", ended=BROKEN, request_id=""),
    ]
    assert wrong(fine, expected) == []
    bad = [seen("one two"), seen("one too", ended=BROKEN), seen("one", request_id="r2")]
    assert [line.partition(": ")[2] for line in wrong(bad, expected)] == [
        "plain saw '' after 7 characters, expected ' three'",
        "plain saw 'oo' after 5 characters, expected 'wo three'",
        "answered, but not on the log",
    ]
