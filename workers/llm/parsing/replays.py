"""Has parsers take the tokens of earlier attempts, part by part. Pure.

An answer may have tens of thousands of tokens when an attempt continues it. Parsing all of them at
once would block the worker for seconds, longer than heartbeats may be late. So each `turn` parses a
bounded number, and the worker runs other tasks between two turns. What the engine generates
meanwhile waits for its parser, at most an answer each. A parser gets the same tokens in the same
order as without that, so its deltas are the same. `workers/llm/active_requests.py` calls this, and
`workers/loops.py` takes the turns.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from workers.llm.engine import Output
from workers.llm.parsing.parsers import AnswerParser

TURN_TOKENS_MAX: Final = 256  # at up to 60 us each


@dataclass(slots=True, eq=False)
class _Replay:
    """A parser that has not caught up."""

    parser: AnswerParser
    rest: Sequence[int]  # of the prior tokens
    outputs: deque[Output] = field(default_factory=deque)  # of the engine since


class ParserReplays:
    """The parsers that have not caught up with their answers, by job id."""

    def __init__(self) -> None:
        self._replays: dict[str, _Replay] = {}

    def __bool__(self) -> bool:
        """Return whether a parser has not caught up."""
        return bool(self._replays)

    def begin(self, job_id: str, parser: AnswerParser, prior: Sequence[int]) -> None:
        """Add a parser that has to take the prior tokens of its answer first."""
        self._replays[job_id] = _Replay(parser, prior)

    def drop(self, job_id: str) -> None:
        """Forget a parser, if it is here."""
        self._replays.pop(job_id, None)

    def holds(self, output: Output) -> bool:
        """Keep an output for later, unless its parser has caught up or the output has no part for
        it, such as allocated KV. Return whether it is kept.
        """
        replay = self._replays.get(output.request_id)
        if replay is None:
            return False
        is_due = bool(output.token_ids or output.text or output.finish_reason)
        if is_due:
            replay.outputs.append(output)
        return is_due

    def next_job_id(self) -> str:
        """Return the job whose turn it is."""
        return next(iter(self._replays))

    def turn(self, job_id: str) -> list[Output]:
        """Parse the next prior tokens of a job, or return outputs that were kept for it: now these
        are to be parsed. They have `TURN_TOKENS_MAX` tokens or few more. The next turn is another
        job's. Raises InvalidAnswer if parsing fails.
        """
        replay = self._replays.pop(job_id)
        outputs: list[Output] = []
        if replay.rest:
            part, replay.rest = replay.rest[:TURN_TOKENS_MAX], replay.rest[TURN_TOKENS_MAX:]
            replay.parser.feed(part)
        else:
            outputs = _first_outputs(replay.outputs)
        if replay.rest or replay.outputs:
            self._replays[job_id] = replay
        return outputs


def _first_outputs(outputs: deque[Output]) -> list[Output]:
    """Remove outputs of a turn from the beginning."""
    part: list[Output] = []
    token_count = 0
    while outputs and token_count < TURN_TOKENS_MAX:
        part.append(outputs.popleft())
        token_count += len(part[-1].token_ids)
    return part
