"""instructor in its modes that call tools: one call, several, parts, lists, a retry; over chats and
over responses.
"""

import sys
from collections.abc import Iterable

import instructor
import openai
from loops import MODEL, answer_script, calls_text
from pydantic import BaseModel, field_validator

client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="x", max_retries=0)


class Pier(BaseModel):
    """A pier by its number."""

    number: int


class Ferry(BaseModel):
    """A ferry by its name."""

    name: str


class EvenPier(BaseModel):
    """A pier with an even number."""

    number: int

    @field_validator("number")
    @classmethod
    def is_even(cls, number: int) -> int:
        if number % 2:
            raise ValueError(
                "not even; say " + answer_script(calls_text(("EvenPier", {"number": 4})))
            )
        return number


def question(text: str) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_retries": 0}


text = answer_script(calls_text(("Pier", {"number": 7})))
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.RESPONSES_TOOLS):
    typed = instructor.from_openai(client, mode=mode)
    assert typed.create(response_model=Pier, **question(text)).number == 7, mode
    retried = answer_script(calls_text(("EvenPier", {"number": 3})))
    with_retries = {**question(retried), "max_retries": 2}
    assert typed.create(response_model=EvenPier, **with_retries).number == 4, mode
typed = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
*_, last = typed.create_partial(response_model=Pier, **question(text))
assert last.number == 7
piers = [{"number": 1}, {"number": 2}]
several = answer_script(calls_text(("IterablePier", {"tasks": piers})))
assert [
    pier.number for pier in typed.create_iterable(response_model=Pier, **question(several))
] == [
    1,
    2,
]
parallel = instructor.from_openai(client, mode=instructor.Mode.PARALLEL_TOOLS)
both = answer_script(calls_text(("Pier", {"number": 7}), ("Ferry", {"name": "Ondry"})))
pier, ferry = parallel.create(response_model=Iterable[Pier | Ferry], **question(both))
assert (pier.number, ferry.name) == (7, "Ondry")
