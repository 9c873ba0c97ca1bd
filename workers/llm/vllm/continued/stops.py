"""Finds stop strings in a continued answer, whose prior text may have begun one. Pure.

vLLM looks for stop strings only in the text that it has generated itself. So the adapter does it
for these answers, on the tokens that vLLM returns.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from schemas.records import Sampling
from workers.llm.engine import Job, Output
from workers.llm.pieces import TextSteps
from workers.llm.stop_strings import StopText


@dataclass(slots=True)
class ContinuedStops:
    """Finds the stop strings of one continued answer, token by token."""

    sampling: Sampling  # of the whole answer
    stops: StopText
    steps: TextSteps
    tokens: int  # of the answer so far

    @classmethod
    def of(cls, job: Job, decode: Callable[[list[int]], str]) -> "ContinuedStops":
        """Return the stops of a job after its prior tokens."""
        tokens, count, sampling = job.prompt_tokens, job.prior_tokens, job.sampling
        steps = TextSteps(decode, tokens[:-count])
        stops = StopText(sampling.stop, include_stop=sampling.include_stop)
        texts = [steps.step(token) for token in tokens[-count:]]
        stops.take_prior(texts, min_tokens=sampling.min_tokens, sent_chars=job.prior_chars)
        return cls(sampling, stops, steps, count)

    def cut(self, output: Output) -> Output:
        """Return an output of vLLM up to a stop string, with the text that is certain."""
        text, tokens = "", output.token_ids
        is_ended = output.finish_reason == "stop"  # by its last token, whose text is left out
        unshown = len(tokens) if is_ended and not self.sampling.include_stop else 0
        for at, token in enumerate(tokens, 1):
            self.tokens += 1
            piece = "" if at == unshown else self.steps.step(token)
            text += self.stops.feed(piece, may_stop=self.tokens > self.sampling.min_tokens)
            if self.stops.matched_stop:
                return replace(
                    output,
                    token_ids=tokens[:at],
                    logprobs=output.logprobs[:at],
                    text=text,
                    finish_reason="stop",
                    stop_reason=self.stops.matched_stop,
                )
        return replace(output, text=text + self.stops.flush() if output.finish_reason else text)
