"""The parts of a gateway that endpoints share. Each endpoint takes the parts that it needs."""

import secrets
from collections.abc import Callable, Sequence

from streams.calls.ids import SESSION_IDLE_MS, Conversation, Conversations, ConversationTurn
from streams.calls.in_flight import CallsInFlight, TokenLog
from streams.calls.log.pool import RetrievalPool
from streams.calls.metrics import Metrics
from streams.calls.stream.event_id import EventIds
from streams.gateway.http.entry import Callers
from streams.log.clock import wall_ms
from streams.openai.cache.answers import AnswerCache
from streams.openai.objects.log import Objects
from streams.openai.responses.log import ResponseStore
from streams.openai.responses.response_id import ResponseIds


class Gateway:
    """What a gateway has for as long as it runs; there is one per process."""

    def __init__(
        self,
        calls: CallsInFlight,
        metrics: Metrics,
        *,
        tokens: TokenLog,
        responses: ResponseStore,
        objects: Objects,
        pool: RetrievalPool,
        publish_turn: Callable[[ConversationTurn], None],
    ) -> None:
        """Set up the parts. `publish_turn` publishes a turn to all gateways soon."""
        settings = calls.settings
        self.settings, self.models = settings, calls.models
        self.calls, self.metrics = calls, metrics
        self.tokens, self.responses, self.objects, self.pool = tokens, responses, objects, pool
        self.callers = Callers(settings)
        self.answers = AnswerCache(settings, pool, metrics)
        # Without a key in the settings, no other gateway can resume the streams of this one.
        event_key = settings.event_key or secrets.token_hex()
        self.event_ids = EventIds(event_key, choices_max=settings.choices_max)
        self.response_ids = ResponseIds(event_key)
        self.conversations = Conversations(
            entries_max=settings.sessions_max, idle_ms=SESSION_IDLE_MS
        )
        self._publish_turn = publish_turn

    def remember(self, conversation: Conversation, answer: str, calls: Sequence[str] = ()) -> None:
        """Remember an answer, so that the conversation's next turn finds its session on any
        gateway."""
        turn = self.conversations.remember(conversation, answer, wall_ms(), calls)
        if turn is not None:
            self._publish_turn(turn)
