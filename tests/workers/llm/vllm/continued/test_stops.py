"""Stop strings of continued answers; on real engines: `tests/workers/llm/continued`."""

from typing import Any

from tests.workers.llm.engines import job
from workers.llm.engine import Output
from workers.llm.vllm.continued.stops import ContinuedStops

WORDS = {1: "one", 2: " two", 3: " three", 4: " four", 9: "<end>"}


def stops(prior: list[int], sent_chars: int, stop: str, **sampling: Any) -> ContinuedStops:
    tokens = [4, *prior]
    continued = job(
        tokens, prior_tokens=len(prior), prior_chars=sent_chars, stop=(stop,), **sampling
    )
    return ContinuedStops.of(continued, lambda ids: "".join(WORDS[token] for token in ids))


def test_stop_string_that_prior_text_begins_ends_answer() -> None:
    cut = stops([1], 2, "e tw").cut(Output(request_id="r", token_ids=[2, 3, 4]))
    assert (cut.token_ids, cut.text) == ([2], "")
    assert (cut.finish_reason, cut.stop_reason) == ("stop", "e tw")


def test_withheld_text_follows_what_was_sent() -> None:
    continued = stops([1], 2, "e tx")
    assert continued.cut(Output(request_id="r", token_ids=[2])).text == "e two"
    last = Output(request_id="r", token_ids=[3, 9], finish_reason="stop")
    assert continued.cut(last).text == " three", "without the token that ended it"


def test_minimum_of_tokens_counts_prior_ones() -> None:
    continued = stops([1], 3, "two", min_tokens=2)
    first = continued.cut(Output(request_id="r", token_ids=[2, 3, 2, 3]))
    assert (first.token_ids, first.text) == ([2, 3, 2], " two three ")
