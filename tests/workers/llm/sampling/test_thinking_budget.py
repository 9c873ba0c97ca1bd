"""Answers whose reasoning may have a number of tokens only."""

import json
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer

from schemas.state_folder import home
from tests.workers.llm.engines import Answer, answered, job, start_sim, start_vllm
from tests.workers.llm.engines import prompt as make_prompt
from workers.llm.sim.settings import SCRIPT_MARKS
from workers.models.folder import make_tiny_model

BUDGET = 6
END = "</think>"


async def answer_of(engine: Any, tokens: list[int], **fields: Any) -> Answer:
    """An answer of up to 24 tokens, whose model ends its reasoning as it is usual."""
    binds_reasoning = fields.pop("binds_reasoning", False)
    request = job(tokens, **{"max_tokens": 24, "thinking_token_budget": BUDGET, **fields})
    request = replace(request, thinking_end=END, binds_reasoning=binds_reasoning)
    return await answered(engine, request)


async def test_simulated_engine_ends_scripted_reasoning() -> None:
    engine = await start_sim(scripted=True)
    tokenizer = engine._vocabulary.tokenizer
    thought = "one two three four five six seven eight"
    tokens = tokenizer.encode(f"{SCRIPT_MARKS[0]}{thought}{END} Done.{SCRIPT_MARKS[1]}").ids
    thought_ids = tokenizer.encode(thought, add_special_tokens=False).ids
    rest = tokenizer.encode(f"{END} Done.", add_special_tokens=False).ids
    for budget in (0, 1, BUDGET, len(thought_ids), 99, None):
        answer = await answer_of(engine, tokens, thinking_token_budget=budget, max_tokens=99)
        ids = thought_ids if budget is None else thought_ids[:budget]
        assert answer.token_ids[: len(ids) + len(rest)] == [*ids, *rest]
        for count in (1, BUDGET, BUDGET + 1):
            behind = [*tokens, *answer.token_ids[:count]]
            fields = {"thinking_token_budget": budget, "max_tokens": 99, "prior_tokens": count}
            continued = await answer_of(engine, behind, **fields)
            assert continued.token_ids == answer.token_ids[count:]
    await engine.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_simulated_engine_ends_drawn_reasoning(temperature: float) -> None:
    engine = await start_sim()
    answer = await answer_of(engine, make_prompt(40), temperature=temperature, seed=3)
    thought, _, content = answer.text.partition(END)
    assert len(engine._vocabulary.tokenizer.encode(thought).ids) == BUDGET and content
    unbounded = await answer_of(engine, make_prompt(40), binds_reasoning=True)
    assert END not in unbounded.text and len(unbounded.token_ids) == 24
    await engine.close()


@pytest.mark.vllm
@pytest.mark.slow  # an engine of its own
async def test_vllm_ends_reasoning() -> None:
    """Also where a successor goes on with it, and counts the tokens that the answer has. Markers
    are one token each, as of most models: with others vLLM allows some tokens more.
    """
    markers = ("^", "~")
    config = dict(zip(("reasoning_start_str", "reasoning_end_str"), markers, strict=True))
    engine = await start_vllm(extra=json.dumps({"reasoning_config": config}))
    folder = make_tiny_model(home() / "models")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    start, end = (tokenizer.encode(text, add_special_tokens=False).ids for text in markers)
    prompt = [*make_prompt(40), *start]
    free = await answer_of(engine, prompt, thinking_token_budget=None)
    answer = await answer_of(engine, prompt)
    thought = free.token_ids[:BUDGET]
    assert answer.token_ids[: BUDGET + len(end)] == [*thought, *end]
    assert len(answer.token_ids) == len(free.token_ids) == 24
    for count in (1, BUDGET - 1, BUDGET, BUDGET + 1, BUDGET + len(end), 20):
        behind = [*prompt, *answer.token_ids[:count]]
        continued = await answer_of(engine, behind, prior_tokens=count)
        assert continued.token_ids == answer.token_ids[count:], count
    await engine.close()
