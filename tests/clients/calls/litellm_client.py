"""litellm: whole, streamed, embeddings, a conversation with tools, and its fallbacks."""

import sys

import litellm
from litellm import Router

URL = sys.argv[1] + "/v1"
MESSAGES = [{"role": "user", "content": "Hello"}]
LONG = [{"role": "user", "content": "word " * 9_000}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
HISTORY = [
    *MESSAGES,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "1"},
]
for provider in ("openai", "hosted_vllm"):
    options = {"model": f"{provider}/sim", "api_base": URL, "api_key": "x", "max_tokens": 4}
    assert litellm.completion(messages=MESSAGES, **options).choices[0].message.content
    assert litellm.completion(messages=HISTORY, **options).choices[0].message.content
    parts = litellm.completion(messages=MESSAGES, stream=True, **options)
    assert "".join(part.choices[0].delta.content or "" for part in parts)
    try:
        litellm.completion(messages=LONG, **options)
    except litellm.ContextWindowExceededError:
        pass
    else:
        raise AssertionError("a prompt that is too long is an error")
embedding = litellm.embedding(model="openai/hash", input=["a"], api_base=URL, api_key="x")
assert len(embedding.data) == 1

served = {"model": "openai/sim", "api_base": URL, "api_key": "x", "max_tokens": 4}
router = Router(
    model_list=[
        {"model_name": "small", "litellm_params": served},
        {"model_name": "large", "litellm_params": {**served, "mock_response": "from another"}},
        {"model_name": "gone", "litellm_params": {**served, "model": "openai/gone"}},
    ],
    context_window_fallbacks=[{"small": ["large"]}],
    fallbacks=[{"gone": ["small"]}],
    num_retries=0,
)
assert router.completion("small", LONG).choices[0].message.content == "from another"
assert router.completion("gone", MESSAGES).choices[0].message.content
