"""`openai` for Python: every helper of `.stream()` and `.parse()`, lists, embeddings, errors."""

import sys

import openai
from pydantic import BaseModel

client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="x", max_retries=0)
MODEL, EMBEDDER = "sim", "hash"
MESSAGES = [{"role": "user", "content": "Hello"}]


class Pier(BaseModel):
    """What an answer is to be."""

    pier: int


names = [model.id for model in client.models.list()]
assert MODEL in names and EMBEDDER in names, names
assert client.models.retrieve(EMBEDDER).id == EMBEDDER

whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4, temperature=0)
with client.chat.completions.stream(
    model=MODEL, messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True
) as stream:
    kinds = {event.type for event in stream}
    snapshot = stream.current_completion_snapshot
assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds, kinds
assert snapshot.choices[0].message.content == whole.choices[0].message.content

with client.chat.completions.stream(
    model=MODEL, messages=MESSAGES, response_format=Pier, stream_options={"include_usage": True}
) as stream:
    stream.until_done()
    final = stream.get_final_completion()
assert isinstance(final.choices[0].message.parsed, Pier) and final.usage
parsed = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Pier)
assert isinstance(parsed.choices[0].message.parsed, Pier)

old = client.completions.create(model=MODEL, prompt="Hello", max_tokens=4, logprobs=0)
assert [len(top) for top in old.choices[0].logprobs.top_logprobs] == [1] * 4

response = client.responses.create(model=MODEL, input="Hello", max_output_tokens=4)
with client.responses.stream(model=MODEL, input="Hello", max_output_tokens=4) as stream:
    events = list(stream)
kinds = {event.type for event in events}
assert {"response.created", "response.output_text.delta", "response.incomplete"} <= kinds, kinds
assert events[-1].response.output_text
with client.responses.stream(model=MODEL, input="Hello", text_format=Pier) as stream:
    assert isinstance(stream.get_final_response().output_parsed, Pier)
formed = client.responses.parse(model=MODEL, input="Hello", text_format=Pier)
assert isinstance(formed.output_parsed, Pier)
with client.responses.stream(response_id=formed.id, starting_after=0) as stream:
    assert stream.get_final_response().output_text == formed.output_text
follow_up = client.responses.create(
    model=MODEL,
    input=[
        {"role": "user", "content": "Hello"},
        {"type": "item_reference", "id": response.output[0].id},
        {"role": "user", "content": "And?"},
    ],
    max_output_tokens=4,
)
assert follow_up.output_text

vectors = client.embeddings.create(model=EMBEDDER, input=["a b", ""])
assert len(vectors.data) == 2

for wrong, error in (
    ({"model": "no"}, openai.NotFoundError),
    ({"messages": [{"role": "user", "content": "word " * 9_000}]}, openai.BadRequestError),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError),
):
    try:
        client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **wrong})
    except error as found:
        assert found.param in ("model", "messages", "tools"), found
    else:
        raise AssertionError(f"{wrong}: no error")
