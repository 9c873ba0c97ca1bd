"""ResponseOutput items from deltas: their order, their borders and their log-probabilities."""

from collections.abc import Sequence

from schemas.records import AnswerDelta, DeltaKind, TokenLogprob
from streams.openai.responses.output import ResponseOutput, StepKind
from tests.streams.gateway.parsed_answers import called, content, reasoning


def folded(deltas: Sequence[AnswerDelta], custom: Sequence[str] = ()) -> ResponseOutput:
    output = ResponseOutput(custom)
    for delta in deltas:
        output.add(delta)
    output.finish()
    return output


def texts_of(output: ResponseOutput) -> list[tuple[str, str, str]]:
    return [(item.kind.value, item.name, item.text) for item in output.items]


def test_parts_of_an_answer_become_items() -> None:
    """White space alone is no message, between reasoning and calls or between calls."""
    deltas = [
        reasoning("Hm"),
        reasoning("."),
        content("\n\n"),
        called("", 0, "f"),
        called("{}", 0),
        content("\n"),
        called("{", 1, "g"),
        called("}", 1),
    ]
    output = folded(deltas)
    assert texts_of(output) == [("reasoning", "", "Hm."), ("call", "f", "{}"), ("call", "g", "{}")]
    assert [item.number for item in output.items] == [0, 0, 1]
    assert [item.index for item in output.items] == [0, 1, 2]
    assert [item.call_id for item in output.items] == ["", "call_0", "call_1"]


def test_white_space_before_a_message_belongs_to_it() -> None:
    output = folded([reasoning("a"), content("\n"), content(" b "), content(" ")])
    assert texts_of(output) == [("reasoning", "", "a"), ("content", "", "\n b  ")]


def test_every_part_may_come_again() -> None:
    output = folded(
        [content("a"), reasoning("b"), content("c"), called("{}", 0, "f"), content("d")]
    )
    kinds = [item.kind for item in output.items]
    assert kinds == [
        *(DeltaKind.CONTENT, DeltaKind.REASONING, DeltaKind.CONTENT),
        *(DeltaKind.CALL, DeltaKind.CONTENT),
    ]
    assert [item.number for item in output.items] == [0, 0, 1, 0, 2]


def test_empty_answer_has_an_empty_message() -> None:
    assert texts_of(folded([])) == [("content", "", "")]
    assert texts_of(folded([content("\n")])) == [("content", "", "\n")]
    assert texts_of(folded([reasoning("a")])) == [("reasoning", "", "a")]


def test_items_close_before_the_next_opens() -> None:
    output = ResponseOutput(["c"])
    deltas = [content("a"), called('{"input":"x', 0, "c"), called("{}", 1, "f")]
    steps = [step for delta in deltas for step in output.add(delta)]
    steps += output.finish()
    kinds = [step.kind for step in steps]
    assert kinds == [StepKind.OPEN, StepKind.DELTA, StepKind.CLOSE] * 3
    assert texts_of(output)[1] == ("call", "c", "x")
    assert [item.is_custom for item in output.items] == [False, True, False]
    assert not output.finish()


def test_content_has_log_probabilities_of_its_tokens() -> None:
    """Those of reasoning and calls are left out, and text that waits has those of all its
    tokens."""
    output = ResponseOutput()
    output.add_logprobs([TokenLogprob(token_id=i, token=str(i), logprob=-i) for i in range(6)])
    for delta in [
        AnswerDelta(seq=1, kind=DeltaKind.REASONING, text="a"),
        AnswerDelta(seq=2, kind=DeltaKind.CONTENT, text=" "),
        AnswerDelta(seq=3, kind=DeltaKind.CONTENT, text="b"),
        AnswerDelta(seq=3, kind=DeltaKind.CONTENT, text="c"),
        AnswerDelta(seq=5, kind=DeltaKind.CALL, text="{}", name="f", call_id="x"),
        AnswerDelta(seq=6, kind=DeltaKind.CONTENT, text="d"),
    ]:
        output.add(delta)
    logprobs = [[token.token for token in item.logprobs] for item in output.items]
    assert logprobs == [[], ["1", "2"], [], ["5"]]
