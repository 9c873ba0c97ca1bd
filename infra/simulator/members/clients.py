"""Simulated clients: each runs a conversation turn by turn and records how it was served.

A turn follows the end of the last answer and a think time. A turn that fails ends its conversation.
If the number of active conversations is limited, later ones wait in order of arrival. A client
receives what the gateway's code assembles from the frames on the log.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from infra.simulator.log.clock import Clock
from infra.simulator.members.gateways import SimAnswer
from infra.simulator.members.searches import retrieval_of
from infra.simulator.models import MODEL, scope_of
from infra.simulator.traffic.script import SimConversation, SimTurn
from schemas.errors import AttemptsDiffer, EngineFailed
from schemas.prefix import chain, salt_of
from schemas.records import (
    Endpoint,
    Mode,
    Orchestration,
    Outcome,
    OutcomeKind,
    Priority,
    Probing,
    Request,
    Retrieval,
    Sampling,
    Structured,
    StructuredKind,
    TokenFrame,
)


@dataclass(slots=True, eq=False)
class ClientRequest:
    """One request as its client saw it. Times are None for events that did not happen."""

    request_id: str
    session_id: str
    turn: int  # from 1
    prompt_tokens: int
    output_tokens: int
    sent_ms: float
    model: str = MODEL
    adapter: str = ""
    first_ms: float | None = None  # the first token, of any worker
    decode_first_ms: float | None = None  # the first token of the worker that completes the answer
    attempt: int = 0
    ended_ms: float | None = None
    outcome: Outcome | None = None
    refused: bool = False  # its gateway could not write it to the log
    differs: bool = False  # a restarted answer was not the same
    lacks_tokens: bool = False  # its gateway gave up waiting for missing tokens
    has_left: bool = False  # its client left, or does not resume after its gateway was lost
    first_ms_by_worker: dict[str, float] = field(
        default_factory=dict
    )  # time of the first token, by worker

    @property
    def completed(self) -> bool:
        return self.outcome is not None and self.outcome.kind is OutcomeKind.COMPLETED

    @property
    def ttft_ms(self) -> float:
        """Return the time from sending to the first token; only for completed requests."""
        assert self.first_ms is not None
        return self.first_ms - self.sent_ms

    @property
    def decode_ttft_ms(self) -> float:
        """Return TTFT if clients see the decode worker's tokens only, as behind the paper's
        proxy."""
        assert self.decode_first_ms is not None
        return self.decode_first_ms - self.sent_ms

    @property
    def tpot_ms(self) -> float:
        """Return the time per token after the first."""
        assert self.first_ms is not None and self.ended_ms is not None
        return (self.ended_ms - self.first_ms) / max(1, self.output_tokens - 1)

    @property
    def took_ms(self) -> float:
        """Return the time from sending to the end."""
        assert self.ended_ms is not None
        return self.ended_ms - self.sent_ms

    @property
    def mode(self) -> Mode:
        return Mode.NONE if self.outcome is None else self.outcome.mode

    @property
    def orchestration(self) -> Orchestration:
        return Orchestration.NONE if self.outcome is None else self.outcome.orchestration


TokenListener = Callable[[ClientRequest, Sequence[int], str], None]  # next tokens, text


class Clients:
    """Sends the turns of all conversations through `send`, and passes tokens to the listeners."""

    def __init__(
        self,
        clock: Clock,
        send: Callable[[Request], None],
        token_listeners: Sequence[TokenListener],
        *,
        timeout_ms: int,
        conversations_max: int = 0,  # at a time; 0: any number
        priority: Priority = Priority.STANDARD,
        weights: tuple[float, float] = (-1.0, -1.0),
        wants: Callable[[str], bool] = lambda request_id: False,
        probing: Callable[[str], Probing | None] = lambda request_id: None,
    ) -> None:
        """`wants` returns whether a request wants retrieval, `probing` how it searches during its
        answer."""
        self.clock = clock
        self.requests: list[ClientRequest] = []
        self.started = 0  # conversations
        self.open = 0  # of these, not ended
        self._send, self._token_listeners = send, token_listeners
        self._wants, self._probing = wants, probing
        self._timeout_ms, self._priority, self._weights = timeout_ms, priority, weights
        self._live: dict[str, tuple[ClientRequest, SimConversation, int]] = {}
        self._by_id: dict[str, ClientRequest] = {}
        self._conversations_max, self._active_conversations = conversations_max, 0
        self._waiting: deque[SimConversation] = deque()

    def start(self, conversations: Sequence[SimConversation]) -> None:
        """Start each conversation at its time."""
        for script in conversations:
            self.started += 1
            self.open += 1
            self.clock.at(script.at_ms, lambda script=script: self._begin(script))  # type: ignore[misc]  # bound now

    def hashes(
        self, request_id: str, prompt: Sequence[int], block: int, scope: str = ""
    ) -> list[int]:
        """Return the block hashes of a request with this prompt in a cache scope.

        They cover its whole conversation; its prompt and answer if passages were inserted; or the
        prompt alone if no client sent the request.
        """
        live = self._live.get(request_id)
        if live is None:
            tokens = np.asarray(prompt, np.int32)
        else:
            _, conversation, index = live
            turn = conversation.turns[index]
            if len(prompt) == turn.prompt_tokens and scope == conversation.cache_scope:
                return conversation.hashes
            end = turn.prompt_tokens + turn.output_tokens
            tokens = np.append(prompt, conversation.tokens[turn.prompt_tokens : end])
        hashes: list[int] = chain(tokens, block, salt_of(scope)).tolist()
        return hashes

    @property
    def waiting(self) -> list[ClientRequest]:
        """Return the requests that have not ended for their clients."""
        return [request for request, _, _ in self._live.values()]

    def rows(self, frame: TokenFrame) -> None:
        """Record which worker sent a request's first token, and in which attempt."""
        for request_id, attempt, seq in zip(
            frame.request_ids, frame.attempts, frame.first_seqs, strict=True
        ):
            live = None if seq else self._live.get(request_id)
            if live is None or attempt < live[0].attempt:
                continue
            request = live[0]
            if attempt > request.attempt:
                request.attempt, request.first_ms_by_worker = attempt, {}
            request.first_ms_by_worker.setdefault(frame.worker_id, self.clock.now_ms)

    def on_answer(self, answer: SimAnswer) -> None:
        """Read the news of an answer: its tokens, its end or its failure."""
        live, stream = self._live.get(answer.key.parent_id), answer.stream
        if live is None or stream.is_catching_up:
            return
        request = live[0]
        if stream.next_seq and request.first_ms is None:
            request.first_ms = self.clock.now_ms
        if self._token_listeners:
            tokens, stream.token_ids = stream.token_ids, []
            text = stream.drain()
            for listener in self._token_listeners:
                listener(request, tokens, text)
        if stream.end is not None:
            # a worker that resumes an answer sends no first token: use the answer's first one
            request.decode_first_ms = request.first_ms_by_worker.get(
                stream.end.decode_worker, request.first_ms
            )
            self._finish(request, whole=stream.end.kind is OutcomeKind.COMPLETED)
        elif answer.failure is not None:
            if isinstance(answer.failure, AttemptsDiffer):
                request.differs = True
                self._finish(request, whole=False)
            else:  # its gateway gave up reading; the outcome still ends it
                request.lacks_tokens = isinstance(answer.failure, EngineFailed)
                self.stop_reading(request.request_id)

    def on_outcome(self, outcome: Outcome) -> None:
        """Note an outcome in the log; the one of the highest attempt counts."""
        request = self._by_id.get(outcome.request_id)
        if request is None or (request.outcome and outcome.attempt < request.outcome.attempt):
            return
        request.outcome = outcome
        if request.has_left:
            self._finish(request, whole=outcome.kind is OutcomeKind.COMPLETED)

    def stop_reading(self, request_id: str) -> None:
        """Stop reading a request's answer; its outcome ends the request then."""
        if request_id in self._live:
            request = self._live[request_id][0]
            request.has_left = True
            if request.outcome is not None:
                self._finish(request, whole=request.completed)

    def _finish(self, request: ClientRequest, *, whole: bool) -> None:
        """End a request; after a whole answer, the next turn follows."""
        live = self._live.pop(request.request_id, None)
        if live is None:
            return
        _, conversation, index = live
        request.ended_ms = self.clock.now_ms
        if whole and index + 1 < len(conversation.turns):
            think_ms = conversation.turns[index + 1].think_ms
            self.clock.after(think_ms, lambda: self._say(conversation, index + 1))
        else:
            self._leave()

    def refuse(self, request_id: str) -> None:
        """End the conversation of a request that was not accepted."""
        request, _, _ = self._live.pop(request_id)
        request.refused, request.ended_ms = True, self.clock.now_ms
        self._leave()

    def _leave(self) -> None:
        """End a conversation, and start one that waits."""
        self.open -= 1
        self._active_conversations -= 1
        if self._waiting:
            self._begin(self._waiting.popleft())

    def _begin(self, conversation: SimConversation) -> None:
        if self._conversations_max and self._active_conversations >= self._conversations_max:
            self._waiting.append(conversation)
            return
        self._active_conversations += 1
        self._say(conversation, 0)

    def _say(self, conversation: SimConversation, index: int) -> None:
        turn, now_ms = conversation.turns[index], self.clock.now_ms
        request_id = f"{conversation.name}-{index + 1}"
        assert request_id not in self._by_id, f"{request_id}: two conversations have one name"
        request = ClientRequest(
            request_id=request_id,
            session_id=conversation.session_id,
            turn=conversation.turns_before + index + 1,
            prompt_tokens=turn.prompt_tokens,
            output_tokens=turn.output_tokens,
            sent_ms=now_ms,
            model=turn.model,
            adapter=turn.adapter,
        )
        self.requests.append(request)
        self._live[request_id] = request, conversation, index
        self._by_id[request_id] = request
        w_ttft, w_tpot = self._weights
        retrieval: Retrieval | None = None
        if self._wants(request_id):
            retrieval = retrieval_of(conversation, index, now_ms, self._probing(request_id))
        self._send(
            Request(
                request_id=request_id,
                parent_id=request_id,
                session_id=conversation.session_id,
                turn=conversation.turns_before + index,
                endpoint=Endpoint.CHAT,
                priority=self._priority,
                model=turn.model,
                adapter=turn.adapter,
                prompt_tokens=conversation.tokens[: turn.prompt_tokens].tobytes(),
                sampling=_sampling(turn),
                arrived_ms=int(now_ms),
                deadline_ms=int(now_ms) + self._timeout_ms,
                gateway_id="clients",
                gateway_partition=0,
                w_ttft=w_ttft,
                w_tpot=w_tpot,
                retrieval=retrieval,
                tenant=conversation.tenant,
                cache_scope=scope_of(conversation.cache_scope, turn.adapter),
            )
        )


def _sampling(turn: SimTurn) -> Sampling:
    if not turn.grammar_chars:
        return Sampling(max_tokens=turn.output_tokens, ignore_eos=True)
    grammar = Structured(kind=StructuredKind.GRAMMAR, value="g" * turn.grammar_chars)
    return Sampling(max_tokens=turn.output_tokens, ignore_eos=True, structured=grammar)
