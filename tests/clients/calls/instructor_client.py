"""instructor in its JSON modes, whole and in parts. Its default mode calls tools."""

import sys

import instructor
import openai
from pydantic import BaseModel

client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="x")
MESSAGES = [{"role": "user", "content": "Where?"}]


class Pier(BaseModel):
    """What an answer is to be."""

    pier: int


class Anything(BaseModel):
    """Any JSON object is one."""

    pier: int | None = None


formed = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
answer = formed.chat.completions.create(
    model="sim", messages=MESSAGES, response_model=Pier, max_retries=0
)
assert isinstance(answer, Pier)
create_partial = formed.chat.completions.create_partial
assert list(create_partial(model="sim", messages=MESSAGES, response_model=Pier))
loose = instructor.from_openai(client, mode=instructor.Mode.JSON)
any_made = loose.chat.completions.create(
    model="sim", messages=MESSAGES, response_model=Anything, max_retries=0
)
assert isinstance(any_made, Anything)
