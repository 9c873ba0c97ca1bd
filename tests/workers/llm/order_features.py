"""What an answer may ask for, which every order must give as one engine alone does.

`infra/docs/placement.md` lists them for users; the suite of engines runs them.
"""

from collections.abc import Callable
from typing import Any

from schemas.records import Structured, StructuredKind
from tests.workers.llm.engines import Answer

Fields = dict[str, Any]


def _stop_string(whole: Answer) -> Fields:
    middle = len(whole.text) // 2
    return {"stop": (whole.text[middle : middle + 4],)}


def _first_token_ends(whole: Answer) -> Fields:
    return {"stop_token_ids": (whole.token_ids[0],)}


def _always(**fields: Any) -> Callable[[Answer], Fields]:
    return lambda _whole: fields


# By the name on the page: what to ask for, from a plain answer to the same prompt.
FEATURES: dict[str, Callable[[Answer], Fields]] = {
    "plain answers": _always(),
    "seeds and temperature": _always(temperature=0.9, seed=7),
    "log-probabilities": _always(logprobs=2),
    "stop strings": _stop_string,
    "stop tokens, also as the first token": _first_token_ends,
    "structured output": _always(
        structured=Structured(kind=StructuredKind.CHOICE, value='["left", "right"]'),
        ignore_eos=False,
    ),
    "answers that go on where an attempt stopped": lambda whole: {"said": 3},
}
