"""What is restored inside vLLM, on stand-ins; on real engines: `tests/workers/llm/continued`."""

import dataclasses
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from workers.llm.vllm.continued.state import (
    PRIOR_TOKENS,
    counting_prior_outputs,
    feeding_prior_tokens,
    prior_outputs_of,
    splitting_prior_outputs,
    telling_prior_outputs,
)
from workers.models.sim import make_tokenizer


@dataclass
class Params:
    """The part of `SamplingParams` that is read."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: list[str] = field(default_factory=list)
    min_tokens: int = 0
    max_tokens: int = 10
    extra_args: dict[str, Any] | None = None


def penalized(prior_tokens: int = 3, **fields: Any) -> Params:
    return Params(extra_args={PRIOR_TOKENS: prior_tokens}, **{"presence_penalty": 1.0, **fields})


def test_prior_tokens_are_outputs_only_for_what_counts_outputs() -> None:
    assert prior_outputs_of(penalized()) == 3
    assert prior_outputs_of(penalized(presence_penalty=0.0, bad_words=["no"])) == 3
    assert prior_outputs_of(penalized(presence_penalty=0.0, frequency_penalty=-0.1)) == 3
    assert prior_outputs_of(penalized(presence_penalty=0.0)) == 0
    assert prior_outputs_of(Params(presence_penalty=1.0)) == 0
    assert prior_outputs_of(None) == 0


@dataclass
class Structured:
    """A request's form: the grammar, and whether its reasoning has ended."""

    grammar: list[int] | None = None
    reasoning_ended: bool | None = None


class Manager:
    """Accepts tokens up to a forbidden one; token 7 ends reasoning."""

    reasoner_cls: Any = None

    def accept_tokens(self, request: Any, tokens: list[int]) -> bool:
        structured = request.structured_output_request
        assert request.all_token_ids[-1] == tokens[0]
        if self.reasoner_cls is None or structured.reasoning_ended:
            structured.grammar.extend(tokens)
        if tokens == [7]:
            structured.reasoning_ended = True
        return tokens != [66]


def fed(tokens: list[int], prior: int, *, reasons: bool = False) -> tuple[list[int], Structured]:
    """The tokens that the new grammar has taken, and the request's own form."""
    manager, form = Manager(), Structured()
    manager.reasoner_cls = object if reasons else None
    request = SimpleNamespace(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=penalized(prior),
        structured_output_request=form,
    )
    grammar: list[int] = []
    create = feeding_prior_tokens(feeding_prior_tokens(lambda self, request: grammar))
    assert create(manager, request) is grammar
    assert form.grammar is None, "the request's own must not be ready yet"
    return grammar, form


def test_new_grammar_takes_prior_tokens_once() -> None:
    assert fed([1, 2, 3, 4, 5], 3)[0] == [3, 4, 5]
    assert fed([1, 2, 3], 0)[0] == []


def test_grammar_takes_prior_tokens_after_reasoning() -> None:
    grammar, form = fed([1, 2, 7, 4, 5], 4, reasons=True)
    assert (grammar, form.reasoning_ended) == ([4, 5], True)
    grammar, form = fed([7, 1, 2, 3], 3, reasons=True)
    assert (grammar, form.reasoning_ended) == ([], False)


def test_refused_prior_token_is_an_error() -> None:
    with pytest.raises(ValueError, match="refuses token 66 of its 2 tokens"):
        fed([1, 66, 3], 2)


def test_prior_tokens_become_outputs_of_worker_once() -> None:
    params = penalized(min_tokens=4)
    request = SimpleNamespace(
        prompt_token_ids=[1, 2, 3, 4, 5],
        num_prompt_tokens=5,
        output_token_ids=[],
        sampling_params=params,
    )
    outputs = request.output_token_ids
    add = counting_prior_outputs(counting_prior_outputs(lambda self, request: request))
    for _ in range(2):
        add(None, request)
        assert (request.prompt_token_ids, request.num_prompt_tokens) == ([1, 2], 2)
        assert request.output_token_ids is outputs == [3, 4, 5]
    assert (request.sampling_params.min_tokens, request.sampling_params.max_tokens) == (7, 13)
    assert (params.min_tokens, params.max_tokens) == (4, 10), "the scheduler's own"


def test_scheduler_counts_prior_outputs() -> None:
    running = [SimpleNamespace(sampling_params=params) for params in (penalized(2), Params())]
    resumed = [SimpleNamespace(sampling_params=penalized(4))]
    make = telling_prior_outputs(
        telling_prior_outputs(
            lambda self, running, resumed: SimpleNamespace(num_output_tokens=[1, 1, 5])
        )
    )
    assert make(None, running, resumed).num_output_tokens == [3, 1, 9]


@pytest.mark.parametrize("whole", [[1, 2, 3, 4, 5], None])
def test_worker_with_all_tokens_gets_shorter_prompt(whole: list[int] | None) -> None:
    """The first model runner gets no such list, and counts by itself."""
    data = SimpleNamespace(
        prompt_token_ids=[1, 2, 3, 4, 5], prefill_token_ids=whole, sampling_params=penalized()
    )
    split = splitting_prior_outputs(splitting_prior_outputs(lambda request: data))
    split(SimpleNamespace(sampling_params=data.sampling_params))
    assert data.prompt_token_ids == ([1, 2] if whole else [1, 2, 3, 4, 5])
    assert data.sampling_params.max_tokens == (13 if whole else 10)


@pytest.mark.vllm
def test_vllm_has_what_is_patched() -> None:
    """Fields and arguments that the wrappers rely on, in the installed vLLM."""
    import inspect

    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

    def arguments(function: Any) -> list[str]:
        return [*inspect.signature(function).parameters]

    assert arguments(StructuredOutputManager._create_grammar) == ["self", "request"]
    assert arguments(StructuredOutputManager.accept_tokens)[1:] == ["request", "new_token_ids"]
    names = arguments(Scheduler._make_cached_request_data)
    assert names[1:3] == ["running_reqs", "resumed_reqs"]
    assert arguments(InputBatch.add_request) == ["self", "request"]
    assert arguments(NewRequestData.from_request)[0] == "request"
    fields = {entry.name for entry in dataclasses.fields(CachedRequestState)}
    assert fields >= {"prompt_token_ids", "output_token_ids", "sampling_params"}
    fields = {entry.name for entry in dataclasses.fields(NewRequestData)}
    assert fields >= {"prompt_token_ids", "prefill_token_ids", "sampling_params"}


@pytest.mark.vllm
@pytest.mark.parametrize("thinks_in_prompt", [True, False])
def test_real_grammar_is_in_state_of_whole_answer_after_any_token(thinks_in_prompt: bool) -> None:
    """vLLM's own manager, grammar and reasoning parser, without an engine."""
    import torch
    import xgrammar
    from transformers import PreTrainedTokenizerFast
    from vllm.reasoning import ReasoningParserManager
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar
    from vllm.v1.structured_output.request import StructuredOutputRequest

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer())
    tokenizer.add_tokens(["<think>", "</think>"])
    size = len(tokenizer)
    manager: Any = StructuredOutputManager.__new__(StructuredOutputManager)
    manager.reasoner_cls = ReasoningParserManager.get_reasoning_parser("deepseek_r1")
    manager.tokenizer, manager.enable_in_reasoning = tokenizer, False
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size, stop_token_ids=[0])
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema('{"type": "object"}')

    def new_grammar(*_: Any) -> Any:
        return XgrammarGrammar(
            matcher=xgrammar.GrammarMatcher(compiled), vocab_size=size, ctx=compiled
        )

    def new_request(tokens: list[int], prior: int) -> Any:
        return SimpleNamespace(
            request_id="r",
            use_structured_output=True,
            structured_output_request=StructuredOutputRequest(params=None),
            prompt_token_ids=list(tokens),
            all_token_ids=list(tokens),
            sampling_params=penalized(prior),
        )

    def state(request: Any, grammar: Any) -> list[Any]:
        mask = xgrammar.allocate_token_bitmask(1, size)
        grammar.fill_bitmask(mask, 0)
        bounds = manager._get_constraint_bounds(request, ())
        return [torch.sum(mask).item(), mask.tolist(), bounds.constraint_start]

    thought = tokenizer.encode("<think>the answer", add_special_tokens=False)
    prompt, answer = ([1, 2, *thought], []) if thinks_in_prompt else ([1, 2], thought)
    answer = [*answer, *tokenizer.encode('is</think>{"a": [1, "b"]}', add_special_tokens=False)]
    whole, grammar = new_request(prompt, 0), new_grammar()
    whole.structured_output_request.grammar = grammar
    create = feeding_prior_tokens(new_grammar)
    for count, token in enumerate(answer):
        request = new_request([*prompt, *answer[:count]], count)
        request.structured_output_request.grammar = fed_grammar = create(manager, request)
        assert state(request, fed_grammar) == state(whole, grammar), f"after {count} tokens"
        whole.all_token_ids.append(token)
        assert manager.accept_tokens(whole, [token])
