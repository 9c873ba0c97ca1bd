"""The state of a prompt that a bridge is answering, and of its topic pair."""

from dataclasses import dataclass, field

from schemas.errors import TriviumError
from streams.bridge.answers import AnswerBuilder
from streams.bridge.config import TopicPair
from streams.bridge.limits import TopicLimits
from streams.bridge.prompts import PromptParser, PromptQuestion
from streams.bridge.records.record import PromptRecord
from streams.calls.embedding import EmbeddingsBody
from streams.calls.request.intake import CallIntake
from streams.calls.stream.hub import Call
from streams.log.transactions import OutgoingRecord


@dataclass(frozen=True, slots=True)
class PairIO:
    """The input and output of a pair: its prompt parser and its answer builder."""

    pair: TopicPair
    prompts: PromptParser
    answers: AnswerBuilder
    limits: TopicLimits = field(default_factory=TopicLimits)


@dataclass(eq=False, slots=True)
class PendingPrompt:
    """A prompt in progress, from when it is read until its answer is committed."""

    record: PromptRecord
    pair_io: PairIO
    question: PromptQuestion | None = None
    # Where its tokens may lie: partitions of `tokens`, and the first offset there.
    starts: dict[int, int] = field(default_factory=dict)
    asked_ms: int = 0
    tries: int = 0
    call: Call | None = None  # of the current try
    intake: CallIntake | None = None  # kept if the answer needs it
    sends: list[OutgoingRecord] | None = None  # the records to commit, once they are known
    error: TriviumError | None = None  # the error in these records

    @property
    def wants_vectors(self) -> bool:
        """Return whether the embedding pool answers the prompt, not the routers."""
        return self.question is not None and isinstance(self.question.body, EmbeddingsBody)
