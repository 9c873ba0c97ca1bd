"""Restores in vLLM the state that a continued answer's earlier tokens have left. Imports no vLLM.

A continued answer's prior tokens are the end of the prompt, and so vLLM's state lacks them. With
these wrappers, which `workers/llm/vllm/plugin.py` applies inside vLLM's processes, the grammar of
the answer's form takes the prior tokens before it constrains a token, also where reasoning precedes
the form. Penalties and bad words count them as output, as they count those of a request that vLLM
has preempted. Stop strings are not found inside vLLM, but by `stops.py`.
"""

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

PRIOR_TOKENS = "trivium_prior_tokens"  # among a request's `extra_args`: number of prior tokens


def prior_tokens_of(params: Any) -> int:
    """Return how many tokens of the prompt belong to the answer, by vLLM's `SamplingParams`."""
    return int(((params and params.extra_args) or {}).get(PRIOR_TOKENS, 0))


def prior_outputs_of(params: Any) -> int:
    """Return how many tokens of the prompt count as output; 0 if nothing counts outputs."""
    counts = params and (params.presence_penalty or params.frequency_penalty or params.bad_words)
    return prior_tokens_of(params) if counts else 0


def feeding_prior_tokens(create_grammar: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `StructuredOutputManager._create_grammar`; the new grammar takes the prior tokens.

    It raises ValueError if they are refused: the request then ends with an error.
    """
    if getattr(create_grammar, "feeds", False):
        return create_grammar

    @functools.wraps(create_grammar)
    def create_fed_grammar(self: Any, request: Any) -> Any:
        grammar = create_grammar(self, request)
        if count := prior_tokens_of(request.sampling_params):
            _feed(self, request, grammar, count)
        return grammar

    create_fed_grammar.feeds = True  # type: ignore[attr-defined]  # marks the replacement
    return create_fed_grammar


def _feed(manager: Any, request: Any, grammar: Any, count: int) -> None:
    """Repeat what vLLM did when the prior tokens were sampled, one by one."""
    tokens, structured = list(request.prompt_token_ids), request.structured_output_request
    replica = copy.copy(structured)  # the request's own is ready only when this is done
    replica.grammar = grammar
    earlier = SimpleNamespace(
        request_id=request.request_id,
        use_structured_output=True,
        structured_output_request=replica,
        prompt_token_ids=tokens[:-count],
        all_token_ids=tokens[:-count],
    )
    for token in tokens[-count:]:
        earlier.all_token_ids.append(token)
        if not manager.accept_tokens(earlier, [token]):
            raise ValueError(f"the form of the answer refuses token {token} of its {count} tokens")
    if manager.reasoner_cls is not None:
        structured.reasoning_ended = bool(replica.reasoning_ended)


def counting_prior_outputs(add_request: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `InputBatch.add_request`; prior tokens become outputs of the worker's request."""
    if getattr(add_request, "counts", False):
        return add_request

    @functools.wraps(add_request)
    def add_counting(self: Any, request: Any) -> Any:
        count = prior_outputs_of(request.sampling_params)
        if count and not getattr(request, "has_prior_outputs", False):
            tokens = request.prompt_token_ids
            request.prompt_token_ids = tokens[:-count]
            request.num_prompt_tokens -= count
            request.output_token_ids[:0] = tokens[-count:]  # in place: others refer to the list
            request.sampling_params = _of_whole_answer(request.sampling_params, count)
            request.has_prior_outputs = True
        return add_request(self, request)

    add_counting.counts = True  # type: ignore[attr-defined]  # marks the replacement
    return add_counting


def telling_prior_outputs(make_data: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Scheduler._make_cached_request_data`, whose counts of outputs workers compare."""
    if getattr(make_data, "tells", False):
        return make_data

    @functools.wraps(make_data)
    def make_telling(self: Any, running: Any, resumed: Any, *args: Any, **kwargs: Any) -> Any:
        data = make_data(self, running, resumed, *args, **kwargs)
        for i, request in enumerate([*running, *resumed]):
            if count := prior_outputs_of(request.sampling_params):
                data.num_output_tokens[i] += count
        return data

    make_telling.tells = True  # type: ignore[attr-defined]  # marks the replacement
    return make_telling


def splitting_prior_outputs(from_request: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `NewRequestData.from_request`, bound to its class, for workers that get all tokens
    (model runner V2).
    """
    if getattr(from_request, "splits", False):
        return from_request

    @functools.wraps(from_request)
    def from_split_request(request: Any, *args: Any, **kwargs: Any) -> Any:
        data = from_request(request, *args, **kwargs)
        count = prior_outputs_of(request.sampling_params)
        if count and data.prefill_token_ids is not None:
            data.prompt_token_ids = data.prompt_token_ids[:-count]
            data.sampling_params = _of_whole_answer(data.sampling_params, count)
        return data

    from_split_request.splits = True  # type: ignore[attr-defined]  # marks the replacement
    return from_split_request


def _of_whole_answer(params: Any, count: int) -> Any:
    """Return a copy of the parameters whose limits count the prior tokens too."""
    whole = copy.copy(params)
    whole.min_tokens += count if whole.min_tokens else 0
    whole.max_tokens += count
    return whole
